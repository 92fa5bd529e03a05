/** Texts that this tab keeps until it closes: the key, the settings, the conversation. */

const texts = new Map(); // where the browser keeps none, because it blocks cookies or they are too long, until the page is left

/** @param {string} name @returns {?string} */
export function kept(name) {
  if (texts.has(name)) return texts.get(name);
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

/** @param {string} name @param {string} text */
export function keep(name, text) {
  texts.set(name, text);
  try {
    sessionStorage.removeItem(name); // so that no older text is left if this one is too long
    sessionStorage.setItem(name, text);
  } catch {
    // `texts` has it
  }
}
