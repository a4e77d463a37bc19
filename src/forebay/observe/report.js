// Draws every figure of the page with the colours of the style sheet, again at each change of
// light and dark. No figure fetches anything: the data lies beside it.
(() => {
  "use strict";
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const phone = window.matchMedia("(max-width: 640px)");

  const resolve = (value, style) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) return value.map((each) => resolve(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([name, each]) => [name, resolve(each, style)]),
    );
  };

  const fit = (layout) => {
    if (!phone.matches) return layout;
    const narrow = { ...layout, font: { ...layout.font, size: 12 } };
    narrow.margin = { ...layout.margin, l: 46, r: 6 };
    return narrow;
  };

  const thin = (trace) =>
    trace.line ? { ...trace, line: { ...trace.line, width: trace.line.width * 0.55 } } : trace;

  const draw = () => {
    const style = window.getComputedStyle(document.documentElement);
    for (const figure of document.querySelectorAll(".figure")) {
      const spec = resolve(JSON.parse(figure.querySelector("script").textContent), style);
      const config = { displayModeBar: false, responsive: true };
      const data = phone.matches ? spec.data.map(thin) : spec.data;
      window.Plotly.react(figure.querySelector(".plot"), data, fit(spec.layout), config);
    }
  };

  draw();
  night.addEventListener("change", draw);
  phone.addEventListener("change", draw);
})();
