// The texts on the page whose contrast with what is behind them is below 4.5 (WCAG AA). Disabled controls are exempt.
() => {
  const rgba = (color) => {
    const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (front, back) => front.slice(0, 3).map((value, at) => value * front[3] + back[at] * (1 - front[3]));
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.unshift(rgba(getComputedStyle(at).backgroundColor));
    return layers.reduce((back, front) => over(front, back), [255, 255, 255]);
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (element) => {
    const back = behind(element);
    const lights = [back, over(rgba(getComputedStyle(element).color), back)].map(luminance).sort();
    return (lights[1] + 0.05) / (lights[0] + 0.05);
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const shown = [...document.body.querySelectorAll("*")].filter((e) => hasText(e) && e.checkVisibility() && !e.closest(":disabled, option"));
  return shown.filter((e) => contrast(e) < 4.5).map((e) => `${e.textContent.trim().slice(0, 40)}: ${contrast(e).toFixed(2)}`);
};
