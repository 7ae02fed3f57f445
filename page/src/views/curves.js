// Curves over steps, as SVG.
import { html, number } from "../html.js";
import { range } from "../tensors.js";

const WIDTH = 100;
const HEIGHT = 40;

/**
 * @param label what the curves show
 * @param series of each `name` and `points`, an array of `[x, y]`; values that are not finite leave a gap
 */
export function Curves({ label, series }) {
  const points = series.flatMap((one) => one.points);
  const [left, right] = range(points.map(([x]) => x));
  const [low, high] = range(points.map(([, y]) => y));
  const place = ([x, y]) => [
    (WIDTH * (x - left)) / (right - left || 1), high > low ? HEIGHT - (HEIGHT * (y - low)) / (high - low) : HEIGHT / 2,
  ];
  return html`
    <figure class="curves">
      <figcaption>${label}${series.map((one, at) => html`<span key=${one.name} class="key curve-${at % 6}">${one.name} ${one.points.length ? number(one.points.at(-1)[1]) : ""}</span>`)}</figcaption>
      <div class="plot"><span class="high">${number(high)}</span>${high > low && html`<span class="low">${number(low)}</span>`}
        <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label="${label}, ${number(low)} to ${number(high)}">
          ${series.map((one, at) => html`<path key=${one.name} class="curve-${at % 6}" d=${path(one.points, place)} />`)}
        </svg></div>
      <div class="axis"><span>${number(left)}</span><span>${number(right)}</span></div>
    </figure>`;
}

function path(points, place) {
  let isDown = false;
  return points.map((point) => {
    if (!point.every(Number.isFinite)) {
      isDown = false;
      return "";
    }
    const [x, y] = place(point);
    const step = `${isDown ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`;
    isDown = true;
    return step;
  }).join("");
}
