/** Reads Prometheus' text format. */

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };
const NUMBERS = { "+Inf": Infinity, "-Inf": -Infinity };

/**
 * @typedef {{labels: Object<string, string>, value: number}} Sample
 * @param {string} text
 * @returns {Map<string, Sample[]>} samples by name
 */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels: parseLabels(labels ?? ""), value: NUMBERS[value] ?? Number(value) });
  }
  return samples;
}

function parseLabels(text) {
  const pairs = [...text.matchAll(LABEL)];
  return Object.fromEntries(pairs.map(([, name, value]) => [name, value.replace(/\\[n"\\]/g, (escaped) => ESCAPES[escaped])]));
}

/** The value of a metric without labels; null if it is absent. @param {Map<string, Sample[]>} samples */
export const valueOf = (samples, name) => samples.get(name)?.[0].value ?? null;

/**
 * A histogram's cumulative counts.
 * @param {Map<string, Sample[]>} samples
 * @returns {{bounds: number[], counts: number[]}}
 */
export function histogramOf(samples, name) {
  const buckets = samples.get(`${name}_bucket`) ?? [];
  return { bounds: buckets.map(({ labels }) => NUMBERS[labels.le] ?? Number(labels.le)), counts: buckets.map(({ value }) => value) };
}

/**
 * A quantile of what a histogram counted between two readings, linear within a bucket. Null if it counted nothing.
 * @param {{bounds: number[], counts: number[]}} now
 * @param {?{counts: number[]}} before
 */
export function quantile({ bounds, counts }, before, share) {
  const grown = counts.map((count, place) => count - (before?.counts[place] ?? 0));
  const rank = share * (grown.at(-1) ?? 0);
  if (!(rank > 0)) return null;
  const place = grown.findIndex((count) => count >= rank);
  const [below, from] = place ? [grown[place - 1], bounds[place - 1]] : [0, 0];
  if (bounds[place] === Infinity) return from;
  return from + ((bounds[place] - from) * (rank - below)) / (grown[place] - below);
}
