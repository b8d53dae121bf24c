/** Returns black or white, whichever is read better on a colour `#rrggbb`. */
export function contrast(hex: string): string {
  const [r, g, b] = [1, 3, 5].map((i) => (Number.parseInt(hex.slice(i, i + 2), 16) / 255) ** 2.2) as [number, number, number];
  // Where both have the same contrast by WCAG's formula.
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#101418" : "#ffffff";
}
