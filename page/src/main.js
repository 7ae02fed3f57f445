import { render } from "preact";
import { html } from "./html.js";
import { PANELS } from "./panels/index.js";
import { chooseModel, connect, isLinkTokenLeft, isTokenWanted, models, server, setToken, start, token, view } from "./state.js";
import { Input } from "./views/input.js";
import { Problem } from "./views/problem.js";
import { Working } from "./views/progress.js";
import { Tabs } from "./views/tabs.js";
import { Tree } from "./views/tree.js";

const LOADED = 3;

function TokenForm() {
  const send = (event) => {
    event.preventDefault();
    if (setToken(new FormData(event.target).get("token").trim())) connect();
  };
  return html`
    <form class="token" onSubmit=${send}>
      <label>Token <input name="token" type="password" autocomplete="off" required /></label>
      <button type="submit">Connect</button>
    </form>`;
}

function Header() {
  return html`
    <header>
      <h1>Trocar</h1>
      <label>Model <select value=${view.model.value} onChange=${(event) => chooseModel(event.target.value)}>
        ${models.value.map((one) => html`<option key=${one.modelId} value=${one.modelId} disabled=${one.state !== LOADED}>${one.modelId}</option>`)}
      </select></label>
      ${server.value && html`<span class="hint">server ${server.value.version}, ${server.value.device}</span>`}
      ${isLinkTokenLeft.value && html`<span class="hint" role="status">The link has another token than yours, which stays in use; to take the link's, forget yours and open the link again.</span>`}
      ${token.value && html`<button onClick=${() => { setToken(""); location.reload(); }}>Forget the token</button>`}
    </header>`;
}

function Panel({ panel }) {
  const { View } = panel;
  if (!panel.usesModel) return html`<${View} />`;
  if (panel.hasOwnInput) return html`<div class="with-model without-input"><${Tree} /><div class="values"><${View} /></div></div>`;
  return html`<div class="with-model"><${Tree} /><${Input} /><div class="values"><${View} /></div></div>`;
}

function Page() {
  const offered = PANELS.filter((one) => one.isOffered?.value ?? true);
  const panel = offered.find((one) => one.name === view.panel.value) ?? offered[0];
  return html`
    <${Header} />
    <${Tabs} tabs=${offered} chosen=${panel.name} onChoose=${(name) => { view.panel.value = name; }} />
    <${Working} />
    <${Problem} onRetry=${connect} />
    ${isTokenWanted.value && html`<${TokenForm} />`}
    <main id="panel" role="tabpanel" aria-labelledby="tab-${panel.name}">
      ${server.value && html`<${Panel} key=${panel.name} panel=${panel} />`}
    </main>`;
}

start();
const root = document.getElementById("page");
root.replaceChildren();
render(html`<${Page} />`, root);
connect();
