// Numbers as people read them. A number that nobody knows is a dash.

export const UNKNOWN = "–";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

function plain(value) {
  return Math.abs(value) < 9.95 ? tenth.format(value) : whole.format(value);
}

export function count(value) {
  return value == null ? UNKNOWN : whole.format(value);
}

export function rate(value) {
  return value == null ? UNKNOWN : plain(value);
}

export function bytes(value) {
  if (value == null) return UNKNOWN;
  let unit = 0;
  while (value >= 1023.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? plain(value) : whole.format(value)} ${UNITS[unit]}`;
}

export function microseconds(value) {
  if (value == null) return UNKNOWN;
  return value < 1000 ? `${whole.format(value)} µs` : `${plain(value / 1000)} ms`;
}

// Layers [begin, end), with the last one named.
export function layers({ begin, end }) {
  return end - begin === 1 ? `layer ${begin}` : `layers ${begin}–${end - 1}`;
}

const STATES = {
  READY: "Ready",
  LOADING: "Loading",
  DRAINING: "Draining",
  FAILED: "Failed",
  LOST: "Lost",
  MISSING: "Missing",
};

export function state(name) {
  return STATES[name] ?? name;
}

export function isBroken(stage) {
  return stage.state === "LOST" || stage.state === "MISSING" || stage.state === "FAILED";
}
