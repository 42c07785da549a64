/**
 * Encoders beside the one that Megatron's flags describe: each entry of `modules` is a record of these keys, typed and bounded like
 * those of a configuration.
 */
import * as v from "valibot";
import { counted } from "../system/counted.ts";
import {
	choice,
	defaulting,
	type Field,
	integer,
	list,
	moduleName,
	number,
	optional,
	path,
	required,
	type ValueOf,
} from "./field.ts";
import { type CamelCase, camelCase } from "./names.ts";
import type { TrainingConfiguration } from "./schema.ts";

/** Keys of every encoder. */
const moduleKeys = {
	name: required(moduleName, "Name of the module."),
	kind: required(choice(["mlp"]), "Kind of its tower."),
	"placeholder-token-id": required(integer(0), "Id of the token that its rows replace."),
	ranks: defaulting(choice(["own", "language"]), "own", "On ranks of its own, or on the language model's."),
	tp: defaulting(integer(1), 1, "Tensor-parallel size."),
	dp: defaulting(integer(1), 1, "Data-parallel size."),
	freeze: optional(list(choice(["tower", "projector"])), "Parts that do not train; unset: none."),
	"lr-mult": defaulting(number(0), 1, "Factor of its learning rate."),
	precision: optional(choice(["fp32", "bf16"]), "Type of its weights and activations; unset: the run's."),
	"init-method-std": optional(number(0), "Standard deviation of initial weights; unset: the run's."),
	"projection-ffn-hidden-size": optional(integer(1), "Inner width of the projector, an MLP; unset: one linear layer."),
	"data-path": optional(path, "A safetensors file of its input; unset: drawn from the seed."),
} as const;

/** Keys of a kind of tower. */
const kindKeys = {
	/** Rows from the frames of a sound or any other series, each by itself. */
	mlp: {
		frames: required(integer(1), "Frames of a sample; each makes a row."),
		"frame-width": required(integer(1), "Values of a frame."),
		"hidden-size": required(integer(1), "Width of the tower."),
	},
} as const;

type AllKeys = typeof moduleKeys & (typeof kindKeys)["mlp"];

/** An encoder, as the whole program reads it. */
export type ModuleConfiguration = { readonly [K in keyof AllKeys as CamelCase<K & string>]: ValueOf<AllKeys[K]> };

function fieldsOf(kind: unknown): Readonly<Record<string, Field>> {
	return { ...moduleKeys, ...(kindKeys[kind as keyof typeof kindKeys] ?? {}) } as unknown as Record<string, Field>;
}

/** The encoders of a checked configuration, with their defaults. */
export function modulesOf({ modules }: Pick<TrainingConfiguration, "modules">): ModuleConfiguration[] {
	return modules.map((record) => {
		const values = Object.entries(fieldsOf(record.kind)).map(([key, field]) => {
			const value = record[key] ?? field.default;
			return [camelCase(key), field.type.kind === "list" && typeof value === "string" ? [value] : value] as const;
		});
		return Object.fromEntries(values) as unknown as ModuleConfiguration;
	});
}

/** Records of a file, whose paths are relative to its folder: `place` returns where a path lies. */
export function withPlacedPaths(records: unknown, place: (path: string) => unknown): unknown {
	if (!Array.isArray(records)) return records;
	return records.map((record: unknown) => {
		if (typeof record !== "object" || record === null) return record;
		const path = (record as Record<string, unknown>)["data-path"];
		return typeof path === "string" ? { ...record, "data-path": place(path) } : record;
	});
}

/** The first mistake in the records' keys and values, as the end of a sentence; null: none. */
export function moduleObjection(records: TrainingConfiguration["modules"]): string | null {
	for (const [index, record] of records.entries()) {
		const fields = fieldsOf(record.kind);
		const where = typeof record.name === "string" ? record.name : `module ${index + 1}`;
		const unknown = Object.keys(record).find((key) => !(key in fields));
		for (const [key, { type, presence }] of Object.entries(fields)) {
			const value = record[key];
			if (value === undefined || value === null) {
				if (presence === "required") return `${key} of ${where} is missing; give ${type.allowed}`;
				continue;
			}
			const given = type.kind === "list" && typeof value === "string" ? [value] : value;
			if (!v.is(type.schema, given))
				return `${key} of ${where} is ${JSON.stringify(value)}; allowed is ${type.allowed}`;
		}
		if (unknown !== undefined) {
			return `${where} has no key ${unknown}; its ${counted(Object.keys(fields).length, "key")} are ${Object.keys(fields).join(", ")}`;
		}
	}
	return null;
}

/** The encoders of `modules` as parts of a model: their widths, not where and how they train; as text. */
export function modelOfModules(modules: TrainingConfiguration["modules"]): string {
	const widths = modulesOf({ modules }).map(({ name, kind, frameWidth, hiddenSize, projectionFfnHiddenSize }) => ({
		...{ name, kind, "frame-width": frameWidth, "hidden-size": hiddenSize },
		"projection-ffn-hidden-size": projectionFfnHiddenSize,
	}));
	return widths.map((one) => JSON.stringify(one)).join(", ");
}

/** Ranks of the further encoders that have ranks of their own. */
export function moduleRanks(c: Pick<TrainingConfiguration, "modules">): number {
	return modulesOf(c).reduce((sum, { ranks, tp, dp }) => (ranks === "own" ? sum + tp * dp : sum), 0);
}
