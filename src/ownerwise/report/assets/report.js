"use strict";
// Draws the charts in the colours of the theme, and handles legend, switch, chooser and theme.
(() => {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const mouse = matchMedia("(hover: hover) and (pointer: fine)").matches;
  const button = document.getElementById("theme");
  const figures = [...document.querySelectorAll("figure[data-figure]")].map((element) => ({
    element,
    hidden: new Set(),
    view: 0,
  }));
  let chosenTheme = null;

  const config = {
    displaylogo: false,
    displayModeBar: mouse ? "hover" : false,
    modeBarButtons: [["toImage", "resetScale2d"]],
    showSendToCloud: false, // plotly offers to upload charts: not from this page
    plotlyServerURL: "",
  };

  const css = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  function mix(position) {
    const stops = [css("ramp-0"), css("ramp-1"), css("ramp-2")];
    const at = Math.min(position * 2, 1.9999);
    const [low, high] = [stops[Math.floor(at)], stops[Math.floor(at) + 1]];
    const channel = (colour, i) => parseInt(colour.slice(1 + 2 * i, 3 + 2 * i), 16);
    const part = at % 1;
    const mixed = [0, 1, 2].map((i) =>
      Math.round(channel(low, i) * (1 - part) + channel(high, i) * part)
    );
    return `rgb(${mixed.join(",")})`;
  }

  function colour(token) {
    return token.startsWith("@ramp:") ? mix(Number(token.slice(6))) : css(token.slice(1));
  }

  // Only these names are colour tokens: a user's own "@name" is left unchanged.
  const colourNames = /colou?r$/;

  function painted(value, name = "") {
    if (Array.isArray(value)) return value.map((item) => painted(item));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, k)]));
    }
    const isToken = typeof value === "string" && value.startsWith("@") && colourNames.test(name);
    return isToken ? colour(value) : value;
  }

  function draw(figure) {
    for (const line of figure.element.querySelectorAll("[data-colour]")) {
      line.setAttribute("stroke", colour(line.dataset.colour));
    }
    for (const panel of figure.element.querySelectorAll(".panel:not([hidden])")) {
      const views = Object.values(charts.panels[panel.dataset.panel]);
      const view = views[Math.min(figure.view, views.length - 1)];
      const data = painted(view.data).map((trace) => ({
        ...trace,
        visible: !figure.hidden.has(trace.legendgroup),
      }));
      const layout = painted({ ...view.layout, template: charts.template });
      const plot = panel.querySelector(".plot");
      layout.width = plot.clientWidth; // plotly's own resizing comes too late for the printer
      layout.height = plot.clientHeight;
      layout.dragmode = mouse ? "zoom" : false; // a finger scrolls the page
      Plotly.react(plot, data, layout, config);
    }
  }

  function show(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(theme === "dark"));
    button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
    figures.forEach(draw);
  }

  const theme = () => chosenTheme ?? (prefersDark.matches ? "dark" : "light");

  button.addEventListener("click", () => {
    chosenTheme = theme() === "dark" ? "light" : "dark";
    show(chosenTheme);
  });
  prefersDark.addEventListener("change", () => show(theme()));

  for (const figure of figures) {
    const { element } = figure;
    for (const key of element.querySelectorAll("[data-series]")) {
      key.addEventListener("click", () => {
        const { series } = key.dataset;
        const hide = !figure.hidden.has(series);
        if (hide) figure.hidden.add(series);
        else figure.hidden.delete(series);
        key.setAttribute("aria-pressed", String(!hide));
        draw(figure);
      });
    }
    const switches = [...element.querySelectorAll("[data-view]")];
    switches.forEach((choice, number) => {
      choice.addEventListener("click", () => {
        figure.view = number;
        switches.forEach((other) => other.setAttribute("aria-pressed", String(other === choice)));
        draw(figure);
      });
    });
    for (const box of element.querySelectorAll("[data-shows]")) {
      box.addEventListener("change", () => {
        element.querySelector(`[data-panel="${box.dataset.shows}"]`).hidden = !box.checked;
        const shown = element.querySelectorAll("[data-shows]:checked").length;
        element.querySelector(".chooser .count").textContent = shown;
        draw(figure);
      });
    }
  }

  // Paper is white: print in the light theme, at the width of the page, with everything open.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not(.chooser):not([open])")];
    closed.forEach((details) => (details.open = true));
    root.classList.add("printing");
    for (const frame of document.querySelectorAll(".scroll")) {
      const share = frame.clientWidth / frame.scrollWidth; // paper does not scroll
      if (share < 1) frame.firstElementChild.style.zoom = 0.99 * share;
    }
    show("light");
  });
  addEventListener("afterprint", () => {
    closed.forEach((details) => (details.open = false));
    root.classList.remove("printing");
    document.querySelectorAll(".scroll > *").forEach((table) => (table.style.zoom = ""));
    show(theme());
  });

  show(theme());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // phones resize whenever their address bar hides
    width = innerWidth;
    figures.forEach(draw);
  });
  root.dataset.ready = "yes";
})();
