// A bar of tabs; arrow keys, Home and End move along it.
import { html } from "../html.js";

const STEPS = { ArrowRight: (at, count) => (at + 1) % count, ArrowLeft: (at, count) => (at + count - 1) % count,
  Home: () => 0, End: (at, count) => count - 1 };

export function Tabs({ tabs, chosen, onChoose }) {
  const move = (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const at = step(tabs.findIndex((one) => one.name === chosen), tabs.length);
    onChoose(tabs[at].name);
    event.currentTarget.children[at].focus();
  };
  return html`
    <div class="tabs" role="tablist" aria-label="Panels" onKeyDown=${move}>
      ${tabs.map(({ name, title }) => html`
        <button key=${name} role="tab" id="tab-${name}" aria-selected=${String(name === chosen)} aria-controls="panel"
                tabindex=${name === chosen ? 0 : -1} onClick=${() => onChoose(name)}>${title}</button>`)}
    </div>`;
}
