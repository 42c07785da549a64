/** What programs that attack runs have in common: their flags, and a table of outcomes by kind. */
import { parseArgs } from "node:util";

/** Flags of a program, as texts; `only`: a kind, all where it is absent. */
export function attackFlags<Name extends string>(
	defaults: Readonly<Record<Name, string>>,
): Record<Name, string> & { readonly only?: string } {
	const options = Object.entries<string>(defaults).map(([name, value]) => [name, { type: "string", default: value }]);
	return parseArgs({ options: { ...Object.fromEntries(options), only: { type: "string" } } }).values as never;
}

/** The value below which a share of all lies; NaN of nothing. */
export function quantile(values: readonly number[], share: number): number {
	const sorted = values.toSorted((a, b) => a - b);
	return sorted[Math.ceil(share * sorted.length) - 1] ?? Number.NaN;
}

/** A line for every kind of outcome and one for all; `columns`: a title, and the cell of some outcomes. */
export function tableOf<Outcome extends { readonly seconds: number }>(
	outcomes: readonly Outcome[],
	kindOf: (outcome: Outcome) => string,
	columns: Readonly<Record<string, (some: readonly Outcome[]) => string | number>>,
): string {
	const seconds = (share: number) => (some: readonly Outcome[]) =>
		quantile(
			some.map((one) => one.seconds),
			share,
		).toFixed(2);
	const times = { "median s": seconds(0.5), "99 % s": seconds(0.99), "most s": seconds(1) };
	const all: [string, (some: readonly Outcome[]) => string | number][] = Object.entries({
		number: (some: readonly Outcome[]) => some.length,
		...times,
		...columns,
	});
	const groups = [...Map.groupBy(outcomes, kindOf), ["all", outcomes] as const];
	const rows = [
		["fault", ...all.map(([title]) => title)],
		...groups.map(([kind, some]) => [kind, ...all.map(([, cell]) => String(cell(some)))]),
	];
	const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => row[column]!.length)));
	const align = (cell: string, column: number) =>
		column === 0 ? cell.padEnd(widths[0]!) : cell.padStart(widths[column]!);
	return rows.map((row) => row.map(align).join("  ")).join("\n");
}
