"use strict";
// The timeline moves: drag over a part of it, or press a step in a table, to look closer. All that
// this does is set positions, from numbers that the page has as attributes.
(() => {
  const lanes = document.getElementById("lanes");
  if (lanes === null) return;
  const about = document.getElementById("about");
  const whole = document.getElementById("whole");
  const ticks = document.querySelectorAll("#axis text");
  const origin = Number(lanes.dataset.begin);
  const span = Number(lanes.dataset.end) - origin;
  const marks = [...lanes.querySelectorAll("rect")].map((rect) => ({
    rect, begin: Number(rect.dataset.begin), end: Number(rect.dataset.end),
  }));
  let shown = { begin: 0, end: span };

  function seconds(us) {
    const size = Math.abs(us);
    if (size < 1e3) return `${Math.round(us)} us`;
    if (size < 1e6) return `${Number((us / 1e3).toPrecision(4))} ms`;
    return `${Number((us / 1e6).toPrecision(6))} s`;
  }

  function show(begin, end) {
    shown = { begin, end };
    const width = end - begin;
    for (const mark of marks) {
      // Clipped to the view: browsers draw coordinates of millions of percent inexactly.
      const from = Math.max(mark.begin, begin - width);
      const to = Math.min(mark.end, end + width);
      mark.rect.style.display = to < from ? "none" : "";
      if (to < from) continue;
      mark.rect.setAttribute("x", `${(100 * (from - begin)) / width}%`);
      mark.rect.setAttribute("width", `${(100 * (to - from)) / width}%`);
    }
    ticks.forEach((tick, index) => {
      tick.textContent = seconds(begin + (width * index) / (ticks.length - 1));
    });
    whole.hidden = begin === 0 && end === span;
  }

  function look(begin, end) {
    const margin = Math.max((end - begin) * 0.05, 1);
    show(Math.max(begin - margin, 0), Math.min(end + margin, span));
  }

  lanes.addEventListener("pointerover", (event) => {
    const title = event.target.closest("rect")?.querySelector("title");
    if (title) about.textContent = title.textContent;
  });

  let drag = null;
  lanes.addEventListener("pointerdown", (event) => {
    const svg = event.target.closest(".track:not(.axis)")?.querySelector("svg");
    if (!svg || event.button !== 0) return;
    const chosen = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    chosen.setAttribute("class", "chosen");
    chosen.setAttribute("height", "100%");
    svg.append(chosen);
    const box = svg.getBoundingClientRect();
    drag = { box, chosen, from: share(event, box), to: share(event, box) };
    lanes.setPointerCapture(event.pointerId);
    event.preventDefault();
  });

  function share(event, box) {
    return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  }

  lanes.addEventListener("pointermove", (event) => {
    if (drag === null) return;
    drag.to = share(event, drag.box);
    drag.chosen.setAttribute("x", `${100 * Math.min(drag.from, drag.to)}%`);
    drag.chosen.setAttribute("width", `${100 * Math.abs(drag.to - drag.from)}%`);
  });

  lanes.addEventListener("pointerup", () => {
    if (drag === null) return;
    const { chosen, from, to } = drag;
    drag = null;
    chosen.remove();
    const width = shown.end - shown.begin;
    const begin = shown.begin + width * Math.min(from, to);
    const end = shown.begin + width * Math.max(from, to);
    if (Math.abs(to - from) > 0.005 && end - begin > 10) show(begin, end);
  });
  lanes.addEventListener("pointercancel", () => { drag?.chosen.remove(); drag = null; });

  whole.addEventListener("click", () => show(0, span));
  for (const button of document.querySelectorAll("button.look")) {
    button.disabled = false;
    button.title = "show on the timeline";
    button.addEventListener("click", () => {
      look(Number(button.dataset.begin) - origin, Number(button.dataset.end) - origin);
      lanes.scrollIntoView({ block: "nearest" });
    });
  }
})();
