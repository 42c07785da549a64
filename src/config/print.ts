/** Shows a resolved configuration: a table for people, or JSON; and a configuration as logs and checkpoints keep it. */
import { shownAddress } from "../system/addresses.ts";
import type { ResolvedConfiguration } from "./resolve.ts";
import { keys, propertyOf, subjects, type TrainingConfiguration } from "./schema.ts";
import { describeOrigin } from "./sources.ts";

/** A table of key, value and origin, grouped by subject; "-" is a value that is unset. */
export function configurationTable({ configuration, origins, notes }: ResolvedConfiguration): string {
	const rows = Object.entries(subjects).map(([subject, group]) => ({
		subject,
		rows: (Object.keys(group) as (typeof keys)[number][]).map(
			(key) => [key, shown(configuration[propertyOf(key)]), describeOrigin(origins[key])] as const,
		),
	}));
	const width = (column: 0 | 1) => Math.max(...rows.flatMap(({ rows }) => rows.map((row) => row[column].length)));
	const [keyWidth, valueWidth] = [width(0), Math.min(width(1), 40)];
	const lines = rows.flatMap(({ subject, rows }) => [
		`# ${subject}`,
		...rows.map(([key, value, origin]) => `${key.padEnd(keyWidth)}  ${value.padEnd(valueWidth)}  ${origin}`),
		"",
	]);
	return [...lines, ...notes].join("\n").trimEnd();
}

/** A resolved configuration as one JSON object: `configuration` by key, `origins` by key, `notes`. */
export function configurationJson({ configuration, origins, notes }: ResolvedConfiguration): string {
	const byKey = <T>(value: (key: (typeof keys)[number]) => T) =>
		Object.fromEntries(keys.map((key) => [key, value(key)]));
	return JSON.stringify(
		{
			configuration: byKey((key) => withoutSecrets(configuration[propertyOf(key)])),
			origins: byKey((key) => describeOrigin(origins[key])),
			notes,
		},
		null,
		2,
	);
}

/** The configuration without the secrets of its URLs, for everything that outlives the run or is passed on. */
export function shownConfiguration(c: TrainingConfiguration): TrainingConfiguration {
	return Object.fromEntries(
		Object.entries(c).map(([property, value]) => [property, withoutSecrets(value)]),
	) as unknown as TrainingConfiguration;
}

function withoutSecrets(value: unknown): unknown {
	if (Array.isArray(value)) return value.map(withoutSecrets);
	return typeof value === "string" ? shownAddress(value) : value;
}

function shown(value: unknown): string {
	if (value === null) return "-";
	const items = (list: readonly unknown[]) =>
		list.map((item) => (typeof item === "object" ? JSON.stringify(item) : item)).join(",");
	return shownAddress(Array.isArray(value) ? items(value) : String(value));
}
