/** How a visitor gets in: by the address that was printed, or by a token. */
import { useState } from "preact/hooks";
import { asRequestError, openSession, posted, type RequestError, session } from "../api.ts";
import { words } from "../i18n/index.ts";
import { Trouble } from "./Panel.tsx";

export function Login() {
  const w = words.value.login;
  const [error, setError] = useState<RequestError | null>(null);
  const [busy, setBusy] = useState(false);
  if (session.value?.login === "key") {
    return (
      <section class="panel login">
        <h1>{w.title}</h1>
        <p>{w.key}</p>
      </section>
    );
  }
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    const token = String(new FormData(form).get("token") ?? "").trim();
    setBusy(true);
    setError(null);
    try {
      await posted("login", { token });
      form.reset();
      await openSession();
    } catch (problem) {
      setError(asRequestError(problem));
    } finally {
      setBusy(false);
    }
  };
  return (
    <section class="panel login">
      <h1>{w.title}</h1>
      <form onSubmit={submit}>
        <label>
          {w.token}
          <input name="token" type="password" autocomplete="off" required />
        </label>
        <button type="submit" class="primary" disabled={busy}>{w.go}</button>
      </form>
      <p class="soft">{w.hint}</p>
      {error ? <Trouble error={error} /> : null}
    </section>
  );
}
