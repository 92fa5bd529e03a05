/** Numbers as text with units. */

const NONE = "–";

/** @param {?number} s */
export function seconds(s) {
  if (s == null || !Number.isFinite(s)) return NONE;
  if (s > 0 && s < 0.0000995) return `${(s * 1e6).toFixed(1)} µs`;
  if (s > 0 && s < 0.000995) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.0995) return `${(s * 1000).toFixed(s > 0 && s < 0.00995 ? 1 : 0)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  return `${s.toFixed(s < 10 ? 2 : s < 100 ? 1 : 0)} s`;
}

/** Decimal units, as wires have. @param {?number} n */
export function bytes(n) {
  if (n == null || !Number.isFinite(n)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; n >= 999.5 && unit < units.length - 1; unit++) n /= 1000;
  return `${n < 10 && unit ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

/** @param {?number} share 0 to 1 */
export function percent(share) {
  if (share == null || !Number.isFinite(share)) return NONE;
  return `${(share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;
}

/** @param {?number} value */
export function rate(value) {
  if (value == null || !Number.isFinite(value)) return NONE;
  return value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

/** @param {?number} value */
export function count(value) {
  return value == null || !Number.isFinite(value) ? NONE : Math.round(value).toLocaleString("en");
}

/** "1 token", "2 tokens". */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
