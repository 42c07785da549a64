/**
 * A configuration key: its type, whether it must be given, its default and one line of help. The groups of keys in
 * keys/ are tables of these; flags, YAML files, help, docs/configuration.md and the TrainingConfiguration type are all
 * made from them.
 */
import * as v from "valibot";

/** How the text of a flag becomes a value, and the legal values. */
export interface ValueType<Value> {
	readonly kind: "number" | "boolean" | "text" | "path" | "paths" | "list" | "records";
	/** Whether a flag's text is converted to numbers. */
	readonly numeric: boolean;
	/** Checks a value of a file or of a converted flag. */
	readonly schema: v.GenericSchema<unknown, Value>;
	/** The legal values, as the end of "allowed is …". */
	readonly allowed: string;
	/** Placeholder in the help: `--lr NUMBER`. */
	readonly placeholder: string;
	/** Megatron's choices that are not built; the error names them. */
	readonly notBuilt: readonly string[];
}

export type Presence = "default" | "optional" | "required" | "derived";

/** The part of a model that a key describes; a key matters only to models with that part (same-model.ts). */
export type ModelPart =
	| "language model"
	| "attention"
	| "latent attention"
	| "attention heads"
	| "positions"
	| "rotary embedding"
	| "YaRN"
	| "learned positions"
	| "dense MLP"
	| "MLP"
	| "Mamba"
	| "Gated DeltaNet"
	| "experts"
	| "softmax router"
	| "adapters"
	| "router"
	| "encoder"
	| "MLP projector";

export interface Extras {
	/**
	 * The part of a model that the key describes; false: a different value makes no different model. Absent: by the key's
	 * group (same-model.ts), which is a part for the language model, Mamba-2 layers, Gated DeltaNet layers, experts and the encoder.
	 */
	readonly model?: false | ModelPart;
	/** Whether descriptions of language models tell the key; absent: if it makes a model. */
	readonly told?: boolean;
	/** Megatron's default where ours differs. */
	readonly megatron?: string;
	/** Other spellings of the key. */
	readonly aliases?: readonly string[];
	/** Reason that the flag has no effect; printed when it is given. */
	readonly noEffect?: string;
	/** Place of the value in the language model's configuration: "attention.outputGate"; absent: a function makes one of it, if any. */
	readonly place?: string;
	/** Megatron's argument in checkpoints, where it is not the key's name. */
	readonly argument?: string;
}

export interface Field<Value = unknown, P extends Presence = Presence> extends Extras {
	readonly type: ValueType<Value>;
	readonly presence: P;
	/** The default; null: there is no default. */
	readonly default: Value | null;
	/** The keys from which a derived default is computed. */
	readonly derivation: string | null;
	/** Accepted because scripts pass it, but its behaviour cannot be switched off. */
	readonly alwaysOn: boolean;
	readonly description: string;
}

/** Type of a key's value in a TrainingConfiguration: null only where the key is optional. */
export type ValueOf<F> = F extends Field<infer Value, infer P> ? (P extends "optional" ? Value | null : Value) : never;

// The types of fields keep their extras, from which those of models' descriptions and configurations follow (language-model.ts).

function field<Value, P extends Presence, E extends Extras>(
	type: ValueType<Value>,
	presence: P,
	description: string,
	rest: { default?: Value; derivation?: string; alwaysOn?: boolean },
	extras: E | undefined,
): Field<Value, P> & E {
	const standing = { default: null, derivation: null, alwaysOn: false };
	return { type, presence, ...standing, ...rest, description, ...extras } as Field<Value, P> & E;
}

/** A key that has to be given by a preset, a file or a flag. */
export function required<Value, const E extends Extras = object>(
	type: ValueType<Value>,
	description: string,
	extras?: E,
): Field<Value, "required"> & E {
	return field(type, "required", description, {}, extras);
}

/** A key that may stay unset; its value is then null. */
export function optional<Value, const E extends Extras = object>(
	type: ValueType<Value>,
	description: string,
	extras?: E,
): Field<Value, "optional"> & E {
	return field(type, "optional", description, {}, extras);
}

/** A key whose default follows from other keys (derive.ts). */
export function derived<Value, const E extends Extras = object>(
	type: ValueType<Value>,
	derivation: string,
	description: string,
	extras?: E,
): Field<Value, "derived"> & E {
	return field(type, "derived", description, { derivation }, extras);
}

export function defaulting<Value, const E extends Extras = object>(
	type: ValueType<Value>,
	value: NoInfer<Value>,
	description: string,
	extras?: E,
): Field<Value, "default"> & E {
	return field(type, "default", description, { default: value }, extras);
}

/** A switch, off unless given. */
export function off<const E extends Extras = object>(description: string, extras?: E): Field<boolean, "default"> & E {
	return field(boolean, "default", description, { default: false }, extras);
}

/** A switch of Megatron for behaviour that is always on here. */
export function alwaysOn(description: string): Field<boolean, "default"> & { readonly alwaysOn: true } {
	const always = { default: true, alwaysOn: true } as const;
	return field(boolean, "default", description, always, undefined) as Field<boolean, "default"> & typeof always;
}

function valueType<Value>(
	kind: ValueType<Value>["kind"],
	placeholder: string,
	allowed: string,
	schema: v.GenericSchema<unknown, Value>,
	notBuilt: readonly string[] = [],
): ValueType<Value> {
	return { kind, numeric: kind === "number", placeholder, allowed, schema, notBuilt };
}

export function integer(minimum: number, maximum = Number.MAX_SAFE_INTEGER): ValueType<number> {
	const allowed =
		maximum === Number.MAX_SAFE_INTEGER
			? `an integer of at least ${minimum}`
			: `an integer from ${minimum} to ${maximum}`;
	const schema = v.pipe(v.number(), v.safeInteger(), v.minValue(minimum), v.maxValue(maximum));
	return valueType("number", "INTEGER", allowed, schema);
}

/** A finite number within closed bounds. */
export function number(minimum = Number.NEGATIVE_INFINITY, maximum = Number.POSITIVE_INFINITY): ValueType<number> {
	const allowed = Number.isFinite(maximum)
		? `a number from ${minimum} to ${maximum}`
		: Number.isFinite(minimum)
			? `a number of at least ${minimum}`
			: "a number";
	return valueType(
		"number",
		"NUMBER",
		allowed,
		v.pipe(v.number(), v.finite(), v.minValue(minimum), v.maxValue(maximum)),
	);
}

export const positiveNumber: ValueType<number> = valueType(
	"number",
	"NUMBER",
	"a number greater than 0",
	v.pipe(
		v.number(),
		v.finite(),
		v.check((x) => x > 0),
	),
);

/** A number in [0, 1): dropout, Adam's betas. */
export const fraction: ValueType<number> = valueType(
	"number",
	"NUMBER",
	"a number from 0 to below 1",
	v.pipe(
		v.number(),
		v.minValue(0),
		v.check((x) => x < 1),
	),
);

export const boolean: ValueType<boolean> = valueType("boolean", "", "true or false", v.boolean());

export const text: ValueType<string> = valueType("text", "TEXT", "text", v.pipe(v.string(), v.nonEmpty()));

/** Height and width of an image in pixels. */
export const imageSize: ValueType<string> = valueType(
	"text",
	"HxW",
	"a height and a width in pixels, such as 384x768",
	v.pipe(v.string(), v.regex(/^[1-9]\d{0,4}x[1-9]\d{0,4}$/)),
);

/** A name in parameters' names and in messages. */
export const moduleName: ValueType<string> = valueType(
	"text",
	"NAME",
	"a name of small letters, digits and _",
	v.pipe(v.string(), v.regex(/^[a-z][a-z0-9_]*$/)),
);

/** Records of keys of their own (modules.ts): in YAML a list of maps, as a flag their JSON. */
export const records: ValueType<readonly Readonly<Record<string, unknown>>[]> = valueType(
	"records",
	"JSON",
	"a list of modules, each with keys of its own",
	v.array(v.record(v.string(), v.unknown())),
);

/** A file or folder; relative to the configuration file that names it, or to the working directory for a flag. */
export const path: ValueType<string> = valueType(
	"path",
	"PATH",
	"the path of a file or folder",
	v.pipe(v.string(), v.nonEmpty()),
);

/** A path, or several with weights before them (Megatron's blends), as one text with blanks between. */
export const paths: ValueType<string> = valueType(
	"paths",
	"PATH…",
	"a path, or weights and paths in turn",
	v.pipe(v.string(), v.nonEmpty()),
);

/** One of the names; `notBuilt` are Megatron's other choices. */
export function choice<const Names extends readonly string[]>(
	names: Names,
	notBuilt: readonly string[] = [],
): ValueType<Names[number]> {
	const allowed = names.length === 1 ? names[0]! : `${names.slice(0, -1).join(", ")} or ${names.at(-1)}`;
	return valueType("text", names.join("|"), allowed, v.picklist(names), notBuilt);
}

/** A number of each colour channel, within closed bounds. */
export function perChannel(minimum: number, maximum: number): ValueType<readonly [number, number, number]> {
	const { schema: channel, ...item } = number(minimum, maximum);
	const schema = v.tuple([channel, channel, channel]) as unknown as v.GenericSchema<
		unknown,
		readonly [number, number, number]
	>;
	const allowed = `three of: ${item.allowed}`;
	return { kind: "list", numeric: true, placeholder: "NUMBER NUMBER NUMBER", allowed, schema, notBuilt: [] };
}

/** One or more values; a single value counts as a list of one. */
export function list<Value>(item: ValueType<Value>): ValueType<readonly Value[]> {
	const schema = v.pipe(v.array(item.schema), v.minLength(1)) as unknown as v.GenericSchema<unknown, readonly Value[]>;
	return {
		kind: "list",
		numeric: item.numeric,
		placeholder: `${item.placeholder}…`,
		allowed: `one or more of: ${item.allowed}`,
		schema,
		notBuilt: item.notBuilt,
	};
}
