/** The editor of SQL: a chunk of its own, loaded by the SQL screen alone. */
import { autocompletion, closeBrackets, completionKeymap, startCompletion, type Completion } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { PostgreSQL, sql, type SQLNamespace } from "@codemirror/lang-sql";
import { bracketMatching, HighlightStyle, syntaxHighlighting } from "@codemirror/language";
import { Compartment, EditorState } from "@codemirror/state";
import { EditorView, keymap, lineNumbers, placeholder } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { visible } from "../text/escape.ts";
import type { TableDoc } from "../types.ts";

export interface Editor {
  text: () => string;
  set: (text: string) => void;
  insert: (text: string) => void;
  tables: (tables: readonly TableDoc[]) => void;
  destroy: () => void;
}

const STYLE = HighlightStyle.define([
  { tag: tags.keyword, color: "var(--accent)", fontWeight: "600" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--ok)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--warn)" },
  { tag: tags.comment, color: "var(--soft)", fontStyle: "italic" },
  { tag: tags.typeName, color: "var(--accent)" },
]);

const THEME = EditorView.theme({
  "&": { backgroundColor: "var(--panel)", color: "var(--text)", fontSize: "13px", border: "1px solid var(--line)", borderRadius: "3px" },
  "&.cm-focused": { outline: "2px solid var(--accent)", outlineOffset: "-1px" },
  ".cm-content": { fontFamily: "var(--mono)", caretColor: "var(--text)", minHeight: "96px", padding: "8px 0" },
  ".cm-scroller": { maxHeight: "320px", overflow: "auto" },
  ".cm-gutters": { backgroundColor: "var(--bg)", color: "var(--soft)", borderRight: "1px solid var(--line)" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "var(--accent-soft) !important" },
  ".cm-tooltip": { backgroundColor: "var(--panel)", color: "var(--text)", border: "1px solid var(--line)" },
  ".cm-tooltip-autocomplete > ul > li[aria-selected]": { backgroundColor: "var(--accent)", color: "var(--on-accent)" },
  ".cm-completionInfo": { maxWidth: "360px", padding: "8px", whiteSpace: "normal" },
  ".cm-placeholder": { color: "var(--soft)" },
  ".cm-matchingBracket": { backgroundColor: "var(--accent-soft)", color: "var(--text)" },
});

/**
 * Returns an editor below `parent`. Its styles are adopted by a shadow root, for the page allows no style of markup.
 */
export function makeEditor(parent: HTMLElement, text: string, label: string, hint: string, onRun: () => void, onChange: (text: string) => void): Editor {
  const root = parent.shadowRoot ?? parent.attachShadow({ mode: "open" });
  root.replaceChildren();
  const language = new Compartment();
  const run = () => {
    onRun();
    return true;
  };
  const view = new EditorView({
    root,
    parent: root,
    state: EditorState.create({
      doc: text,
      extensions: [
        lineNumbers(),
        history(),
        bracketMatching(),
        closeBrackets(),
        autocompletion({ icons: false, activateOnTyping: true }),
        keymap.of([{ key: "Ctrl-Enter", mac: "Cmd-Enter", run }, { key: "Ctrl-Space", run: startCompletion }, ...completionKeymap, ...historyKeymap, ...defaultKeymap]),
        language.of(sql({ dialect: PostgreSQL, upperCaseKeywords: true })),
        syntaxHighlighting(STYLE),
        THEME,
        placeholder(hint),
        EditorView.lineWrapping,
        EditorView.contentAttributes.of({ "aria-label": label }),
        EditorView.updateListener.of((update) => {
          if (update.docChanged) onChange(update.state.doc.toString());
        }),
      ],
    }),
  });
  const replace = (from: number, to: number, insert: string) => view.dispatch({ changes: { from, to, insert }, selection: { anchor: from + insert.length } });
  return {
    text: () => view.state.doc.toString(),
    set: (value) => replace(0, view.state.doc.length, value),
    insert: (value) => {
      const { from, to } = view.state.selection.main;
      replace(from, to, value);
      view.focus();
    },
    tables: (tables) => view.dispatch({ effects: language.reconfigure(sql({ dialect: PostgreSQL, upperCaseKeywords: true, schema: schemaOf(tables) })) }),
    destroy: () => view.destroy(),
  };
}

/** Returns tables and columns for the completion, with their docs. */
function schemaOf(tables: readonly TableDoc[]): SQLNamespace {
  const schemas: Record<string, Record<string, SQLNamespace>> = {};
  for (const { table, doc, columns } of tables) {
    const [schema, name] = table.split(".", 2) as [string, string | undefined];
    if (!name) continue;
    const children = columns.map((column): Completion => ({ label: column.name, type: "property", detail: visible(column.type, 40), info: visible(column.doc, 600) }));
    (schemas[schema] ??= {})[name] = { self: { label: name, type: "type", info: visible(doc, 600) }, children };
  }
  return schemas;
}
