/** Lines of a log as checked entries: a report may be drawn of a log that another program has made or changed. */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { type JsonLimits, jsonText } from "../../system/json.ts";

/** Bytes of the longest line of a log: tokens by expert of hundreds of layers. */
export const LARGEST_LOG_LINE = 2 ** 24;
const limits: JsonLimits = { bytes: LARGEST_LOG_LINE, values: 2 ** 22, depth: 64 };

export type Entry = Readonly<Record<string, unknown>>;

const topologySchema = v.object({
	modules: v.optional(
		v.array(
			v.object({
				name: v.string(),
				size: v.number(),
				sizes: v.optional(v.record(v.string(), v.number())),
				/** Ranks of each data lane. */
				lanes: v.array(v.array(v.number())),
			}),
		),
	),
});
/** The topology in the event of a start, as far as it is drawn. */
export type LoggedTopology = v.InferOutput<typeof topologySchema>;

/** The fields of an entry that a report reads beyond plain numbers and texts. */
export interface CheckedFields {
	readonly topology: LoggedTopology | null;
	readonly modules: readonly (Entry & { readonly name: string })[];
	/** Peak bytes by rank. */
	readonly memory: readonly { readonly allocated: number; readonly reserved: number; readonly peak: number }[];
	/** Tokens of each expert by layer. */
	readonly experts: readonly (readonly [layer: number, counts: readonly number[]])[];
}

/** The text of a line. Throws a UserError that names the line, as `name`, if its JSON is too large or deep to be parsed. */
export const entryText = (line: Uint8Array, name: string): string => jsonText(line, name, limits);

/** The object of a line's text; null: the line is torn, or is another value. */
export function parseEntry(text: string): Entry | null {
	try {
		const value: unknown = JSON.parse(text);
		return isObject(value) ? value : null;
	} catch {
		return null;
	}
}

/** Checks the fields of an entry. Throws a UserError that names the line, as `name`, and the malformed field. */
export function checkedFields(entry: Entry, name: string): CheckedFields {
	const refuse = (field: string, what: string): never => {
		throw new UserError(`${name} is not a log's: ${field} is not ${what}.`);
	};
	const given = (field: string): unknown => entry[field] ?? null;
	if ("iteration" in entry && !Number.isFinite(entry.iteration)) refuse("iteration", "a number");
	const topology = given("topology");
	const { success, output } = v.safeParse(v.nullable(topologySchema), topology);
	if (!success) refuse("topology", "a list of modules with their ranks");
	const modules = given("modules") ?? [];
	if (!Array.isArray(modules) || !modules.every((one) => isObject(one) && typeof one.name === "string")) {
		refuse("modules", "a list of named modules");
	}
	const memory = given("memory") ?? [];
	if (!Array.isArray(memory) || !memory.every(isMemory)) refuse("memory", "a list of bytes by rank");
	const experts = given("tokens_per_expert") ?? {};
	if (!isObject(experts)) return refuse("tokens_per_expert", "counts by layer");
	return {
		topology: output as LoggedTopology | null,
		modules: modules as CheckedFields["modules"],
		memory: memory as CheckedFields["memory"],
		experts: Object.entries(experts).map(([layer, counts]) => {
			const isList = Array.isArray(counts) && counts.length > 0 && counts.every((count) => Number.isFinite(count));
			if (!/^\d{1,9}$/.test(layer) || !isList) refuse("tokens_per_expert", "counts by layer");
			return [Number(layer), counts as readonly number[]];
		}),
	};
}

function isObject(value: unknown): value is Entry {
	return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isMemory(value: unknown): boolean {
	return isObject(value) && ["allocated", "reserved", "peak"].every((field) => Number.isFinite(value[field]));
}
