"use strict";
// Numbers for people.

const Format = {
  bytes(n) {
    let value = n;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      const text = unit === "B" ? String(value) : value.toFixed(Math.abs(value) < 100 ? 1 : 0);
      if (Math.abs(text) < 1024) return `${text} ${unit}`; // rounded: never "1024 KiB"
      value /= 1024;
    }
    return `${value.toFixed(1)} TiB`;
  },
  seconds(s) {
    if (s === 0) return "0 s";
    const micro = (s * 1e6).toFixed(s < 1e-5 ? 1 : 0), milli = (s * 1e3).toFixed(s < 0.1 ? 2 : 1);
    if (micro < 1000) return `${micro} µs`;
    return milli < 1000 ? `${milli} ms` : `${s.toFixed(2)} s`;
  },
  flops(n) {
    const units = ["", "k", "M", "G", "T", "P"];
    let value = n, unit = 0;
    while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}FLOP`;
  },
  rate(n) {
    return `${Number((n / 1e9).toPrecision(3)).toLocaleString("en")} GB/s`;
  },
  count(n, one, many) {
    return `${n.toLocaleString("en")} ${n === 1 ? one : many || one + "s"}`;
  },
  percent(x) {
    return `${(100 * x).toFixed(x < 0.1 ? 1 : 0)} %`;
  },
};
