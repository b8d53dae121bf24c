/** Choices that this browser keeps. Where it keeps nothing, as in a private window, they last as long as the page. */

const PREFIX = "probing.";

export function kept(name: string): string | null {
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return null;
  }
}

export function keep(name: string, value: string): void {
  try {
    localStorage.setItem(PREFIX + name, value);
  } catch {
    // Nothing is lost but the choice.
  }
}
