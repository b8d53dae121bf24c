/** A small line of values over time; an unknown value leaves a gap. */

const [WIDTH, HEIGHT] = [96, 20];

export function Sparkline({ values, label }: { values: readonly (number | null)[]; label: string }) {
  const shown = values.slice(-60);
  const most = Math.max(0, ...shown.filter((value): value is number => value !== null && Number.isFinite(value)));
  if (shown.length < 4 || most <= 0) return <span class="sparkline-none" />;
  let path = "";
  let pen = "M";
  shown.forEach((value, index) => {
    if (value === null || !Number.isFinite(value)) {
      pen = "M";
      return;
    }
    const x = (index / (shown.length - 1)) * (WIDTH - 2) + 1;
    const y = HEIGHT - 2 - (value / most) * (HEIGHT - 4);
    path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return (
    <svg class="sparkline" width={WIDTH} height={HEIGHT} viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label}>
      <path d={path} />
    </svg>
  );
}
