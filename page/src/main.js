import { render } from "preact";
import { html } from "./html.js";
import { chooseModel, connect, isTokenWanted, models, problem, server, setToken, start, token, view, working } from "./state.js";
import { Channels } from "./views/channels.js";
import { Input } from "./views/input.js";
import { Tree } from "./views/tree.js";

function TokenForm() {
  const send = (event) => {
    event.preventDefault();
    setToken(new FormData(event.target).get("token").trim());
    connect();
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
        ${models.value.map((one) => html`<option key=${one.modelId} value=${one.modelId} disabled=${one.state !== 3}>${one.modelId}</option>`)}
      </select></label>
      ${server.value && html`<span class="hint">server ${server.value.version}, ${server.value.device}</span>`}
      ${token.value && html`<button onClick=${() => { setToken(""); location.reload(); }}>Forget the token</button>`}
    </header>`;
}

function Page() {
  return html`
    <${Header} />
    <div class="status" role="status">${working.value && html`<progress aria-label=${working.value}></progress> ${working.value}`}</div>
    ${problem.value && html`
      <div class="problem" role="alert"><strong>${problem.value.what}: ${problem.value.code}</strong><p>${problem.value.text}</p>
        <button onClick=${connect}>Try again</button></div>`}
    ${isTokenWanted.value && html`<${TokenForm} />`}
    ${models.value.length > 0 && html`<main><${Tree} /><${Input} /><div class="values"><${Channels} /></div></main>`}`;
}

start();
const root = document.getElementById("page");
root.replaceChildren();
render(html`<${Page} />`, root);
connect();
