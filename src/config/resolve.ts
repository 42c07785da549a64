/**
 * Resolves a configuration: checkpoint < preset < file < flags → one checked TrainingConfiguration. All mistakes of all sources
 * are reported together. Folders of weights that the values name describe the model: they provide keys that are not given, and
 * given keys must not contradict them.
 */
import { existsSync } from "node:fs";
import { dirname, relative, resolve } from "node:path";
import * as v from "valibot";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { checks, lengthIsGiven, patternIsLegal } from "./checks/all.ts";
import type { Check } from "./checks/check.ts";
import { modulesAreLegal } from "./checks/modules.ts";
import { type Derivation, dataLanes, defaultOffset, derivations, weightShards } from "./derive.ts";
import { Draft } from "./draft.ts";
import { parseFile } from "./file.ts";
import { type CommandFlags, parseFlags } from "./flags.ts";
import { parsePattern, storedPattern } from "./hybrid-pattern.ts";
import { modelKeys } from "./keys/model.ts";
import { isPresetName, presetValues } from "./presets.ts";
import {
	type DerivedKey,
	fieldOf,
	type Key,
	keyOf,
	keys,
	type TrainingConfiguration,
	trainingSchema,
} from "./schema.ts";
import {
	type Aside,
	describeOrigin,
	type Entry,
	type FolderReader,
	type FolderValue,
	type Origin,
	type Problem,
} from "./sources.ts";
import { upstreamValues } from "./upstream-flags.ts";
import { RewriteError, rewritten } from "./upstream-rewrites.ts";

export interface ResolvedConfiguration {
	readonly configuration: TrainingConfiguration;
	/** Origin of each value. */
	readonly origins: Readonly<Record<Key, Origin>>;
	/** Notes for the user: flags without effect here, a pattern that overrules num-layers. */
	readonly notes: readonly string[];
	/** Values of the command's own flags. */
	readonly command: Readonly<Record<string, string>>;
}

export interface ResolveOptions {
	/** Whether the command needs the length of the training; default: it does. */
	readonly trains?: boolean;
	/** Reads the model's keys from folders of weights. */
	readonly folders?: FolderReader;
	/** The folder that a value of such a key stands for, such as a name on Hugging Face's Hub. */
	readonly place?: (path: string, staging: string | null) => string;
	/** Returns further entries, of lower precedence than the given ones, such as a checkpoint's values of its model. */
	readonly beneath?: (given: readonly Entry[]) => readonly Entry[];
	/** Keys whose values are not used; checks that read them are skipped. */
	readonly unchecked?: readonly Key[];
	/** Returns the sequences of a pass over the training data, from which train-iters follows with train-epochs. */
	readonly epoch?: (configuration: TrainingConfiguration) => number;
	/** GPUs that this host's ranks see; null: not known. */
	readonly gpus?: number | null;
	/** Ranks that the run has, from its launcher; null: as many as the configuration needs. */
	readonly ranks?: number | null;
}

/**
 * Resolves command-line arguments: configuration flags, `--config FILE` and the command's own flags (name → takes a value).
 * Throws one UserError with every mistake.
 */
export function resolveConfiguration(
	args: readonly string[],
	commandFlags: CommandFlags = {},
	options: ResolveOptions = {},
): ResolvedConfiguration {
	const { trains = true, folders = () => [], place = (path) => path, beneath } = options;
	const { unchecked = [], epoch = null, gpus = null } = options;
	const flags = parseFlags(args, { ...commandFlags, config: true });
	const ranks = options.ranks ?? (Number(flags.command.nproc) || null);
	const file = flags.command.config === undefined ? null : parseFile(flags.command.config);
	const given = [...(file?.entries ?? []), ...flags.entries].flatMap(withUpstreamValues);
	const asides = [...(file?.asides ?? []), ...flags.asides];
	const isFlag = (wanted: Key) => flags.entries.some(({ key }) => key === wanted);
	const problems = [...flags.problems, ...(file?.problems ?? [])].filter(
		({ unlessGiven }) => unlessGiven === undefined || !isFlag(unlessGiven),
	);
	// Mistakes in the given entries are reported before mistakes in the folders that they name.
	const understood = problems.length === 0;
	const base = beneath && understood ? beneath(given) : [];
	// Keys cannot be called missing if `beneath`, which may have them, was not read.
	const complete = (file?.complete ?? true) && (beneath === undefined || understood);
	const sources = { base, given, asides, problems, complete, folders, place, trains, unchecked, epoch, gpus, ranks };
	const resolved = resolveEntries(sources);
	const notes = [...(file?.notes ?? []), ...flags.notes, ...resolved.notes];
	return { ...resolved, notes, command: flags.command };
}

/** The entries that upstream's name of a key's value stands for. */
function withUpstreamValues({ key, value, origin }: Entry): Entry[] {
	return upstreamValues(key, value).map(([key, value]) => ({ key, value, origin }));
}

/** A configuration from keys and values in the program, checked like any other. `trains`: as in resolveConfiguration. */
export function configurationOf(
	values: Readonly<Partial<Record<Key, unknown>>>,
	{ trains = true }: { readonly trains?: boolean } = {},
): TrainingConfiguration {
	const entries = Object.entries(values).map(([name, value]) => {
		const key = keyOf(name);
		if (key === undefined) throw new UserError(`There is no configuration key ${name}.`, exitCodes.usage);
		return { key, value, origin: { source: "program" } } as const;
	});
	const none = { base: [], asides: [], problems: [], unchecked: [], epoch: null, gpus: null, ranks: null };
	const empty = { ...none, folders: () => [], place: (path: string) => path };
	return resolveEntries({ ...empty, given: entries, complete: true, trains }).configuration;
}

/** Sources of configuration values in ascending precedence, and how they are checked. */
interface Sources {
	/** A checkpoint's values, beneath all others. */
	readonly base: readonly Entry[];
	readonly given: readonly Entry[];
	readonly asides: readonly Aside[];
	/** Mistakes found while the sources were parsed. */
	readonly problems: readonly Problem[];
	/** Whether every source was parsed whole, so that a key in none of them is missing. */
	readonly complete: boolean;
	readonly folders: FolderReader;
	readonly place: (path: string, staging: string | null) => string;
	/** Whether the command needs the length of the training. */
	readonly trains: boolean;
	/** Keys whose checks are skipped. */
	readonly unchecked: readonly Key[];
	/** Sequences of a pass over the training data; null: train-iters is not computed from train-epochs. */
	readonly epoch: ((configuration: TrainingConfiguration) => number) | null;
	/** GPUs that this host's ranks see; null: not known. */
	readonly gpus: number | null;
	/** Ranks of the run; null: not known. */
	readonly ranks: number | null;
}

function resolveEntries(sources: Sources): Omit<ResolvedConfiguration, "command"> {
	const resolution = new Resolution(sources);
	resolution.takeValues();
	resolution.parse();
	resolution.derive();
	resolution.check();
	resolution.countSteps();
	return resolution.finish();
}

/** A configuration on its way from sources to checked values. Collects every mistake and throws them together. */
class Resolution {
	readonly #origins = {} as Record<Key, Origin>;
	readonly #raw: Partial<Record<Key, unknown>> = {};
	readonly #draft = new Draft();
	readonly #refused = new Set<Key>();
	readonly #problems: Problem[];
	readonly #notes: string[] = [];
	/** Whether a key in no source is known to be missing: an unknown preset, a bad file or an unread folder might have set it. */
	#knowsMissing = false;

	constructor(private readonly sources: Sources) {
		this.#problems = [...sources.problems];
	}

	/** Takes values from the base, the preset, the given entries and the folders they name. */
	takeValues(): void {
		const { base, given, complete, folders } = this.sources;
		for (const { key, value, origin } of base) this.#take(key, value, origin);
		const preset = given.findLast(({ key }) => key === "preset")?.value;
		if (isPresetName(preset)) {
			for (const [key, value] of presetValues(preset, new Set(given.map(({ key }) => key)))) {
				this.#take(key, value, { source: "preset", name: preset });
			}
		}
		for (const { key, value, origin } of given) this.#take(key, value, origin);
		// A flag or key that was not understood may have been meant to name a folder, so folders are read only without problems.
		const understood = complete && this.#problems.length === 0;
		const named = folderKeys.some((key) => key in this.#raw);
		for (const value of understood ? folders((name) => this.#raw[name]) : []) this.#takeFromFolder(value);
		if (understood || !named) this.#rewrite();
		this.#knowsMissing =
			complete && (understood || !named) && (preset === undefined || preset === null || isPresetName(preset));
	}

	/** Takes the flags of Megatron whose meaning depends on the values, and what Megatron's MIMO loop does with those of its presets. */
	#rewrite(): void {
		try {
			const { values, dropped, notes } = rewritten(this.sources.asides, this.#raw);
			for (const key of dropped) delete this.#raw[key];
			for (const [key, value, origin] of values) this.#take(key, value, origin);
			this.#notes.push(...notes);
		} catch (error) {
			if (!(error instanceof RewriteError)) throw error;
			const { name, origin } = error.aside;
			const isFlag = origin.source === "flag";
			const where = isFlag ? origin.name : describeOrigin(origin);
			this.#problems.push({ where, message: `${isFlag ? "" : `${name}: `}${error.message}` });
		}
	}

	/** Fills in fixed defaults, and checks the type and bounds of each value. */
	parse(): void {
		for (const key of keys) {
			const field = fieldOf(key);
			if (key in this.#raw) this.#draft.set(key, this.#raw[key]);
			else if (field.presence === "default" || field.presence === "optional") {
				this.#draft.set(key, field.default);
				this.#origins[key] = { source: "default" };
			}
		}
		const parsed = v.safeParse(trainingSchema, this.#raw);
		for (const issue of parsed.issues ?? []) {
			const key = issue.path![0]!.key as Key;
			if (!this.#refused.has(key)) this.#refuse(key, disallowed(key, this.#raw[key]));
		}
		for (const key of Object.keys(this.#raw) as Key[]) {
			if (!this.#refused.has(key) && fieldOf(key).alwaysOn && this.#raw[key] === false) {
				this.#refuse(key, "allowed is true: it is always so here");
			}
		}
		for (const key of keys) if (fieldOf(key).presence === "required" && !(key in this.#raw)) this.#lack(key);
	}

	/** Computes derived defaults, which read the layer pattern. */
	derive(): void {
		this.#inspect([patternIsLegal, modulesAreLegal]);
		for (const [key, derive] of Object.entries(derivations) as [DerivedKey, Derivation][]) {
			if (key in this.#raw) continue;
			const result = this.#draft.read((c) => ({ value: derive(c, this.sources) }));
			if (result === undefined) continue;
			if (result.value === undefined) {
				this.#lack(key);
				continue;
			}
			const { type, derivation } = fieldOf(key);
			this.#origins[key] = { source: "derived", from: derivation! };
			this.#draft.set(key, result.value);
			if (!v.is(type.schema, result.value))
				this.#refuse(key, `allowed is ${type.allowed}, so it has to be given (flag --${key})`);
		}
	}

	/** Checks conditions over several keys. */
	check(): void {
		const { trains, unchecked } = this.sources;
		const all = this.#knowsMissing && trains ? [lengthIsGiven, ...checks] : checks;
		this.#draft.without(unchecked, () => this.#inspect(all));
	}

	/** Computes train-iters from train-epochs. The data are opened only for a configuration without a mistake. */
	countSteps(): void {
		const { trains, epoch } = this.sources;
		if (this.#problems.length > 0 || !trains || epoch === null) return;
		const c = this.#draft.finish();
		if (c.trainEpochs === null) return;
		const sequences = epoch(c);
		// 12 digits: 0.1 epochs of 30 sequences are 3 sequences.
		const steps = Math.ceil(Number(((c.trainEpochs * sequences) / c.globalBatchSize).toPrecision(12)));
		if (!Number.isSafeInteger(steps)) {
			this.#refuse("train-epochs", `of ${sequences} sequences these are more steps than can be counted`);
			return;
		}
		this.#draft.set("train-iters", steps);
		this.#origins["train-iters"] = { source: "derived", from: "train-epochs, data-path and global-batch-size" };
		this.#notes.push(
			`train-epochs ${c.trainEpochs} of ${counted(sequences, "sequence")}: ${counted(steps, "step")} of global-batch-size ${c.globalBatchSize}.`,
		);
		this.#draft.without(["train-epochs"], () => this.check());
	}

	/** Throws a UserError with every mistake, if there are any. */
	finish(): Omit<ResolvedConfiguration, "command"> {
		if (this.#problems.length > 0) throw new UserError(report(this.#problems), exitCodes.usage);
		const c = this.#draft.finish();
		if (this.#origins["llm-offset"].source === "derived" && c.llmOffset !== defaultOffset(c)) {
			this.#notes.push("One GPU is visible: encoder and language model share it in one process (llm-offset 0).");
		}
		const notes = [...this.#notes, ...notesOn(this.sources.given, this.#draft.finish())];
		const { segments, mtp } = parsePattern(this.#draft.finish().hybridLayerPattern);
		this.#draft.set("num-layers", segments.flat(2).length);
		this.#draft.set("mtp-num-layers", mtp?.depths ?? 0);
		return { configuration: this.#draft.finish(), origins: this.#origins, notes };
	}

	#take(key: Key, value: unknown, origin: Origin): void {
		this.#raw[key] = folderKeys.includes(key) && typeof value === "string" ? this.#place(value, origin) : value;
		this.#origins[key] = origin;
	}

	/** A path that a file gives is relative to the folder of that file; a name on the Hub is not a path. */
	#place(path: string, origin: Origin): string {
		const staging = this.sources.given.findLast(({ key }) => key === "staging-dir")?.value;
		const place = (named: string) => this.sources.place(named, typeof staging === "string" ? staging : null);
		if (origin.source !== "file" || path.includes("://")) return place(path);
		const written = relative(dirname(resolve(origin.file)), path);
		const placed = existsSync(path) ? written : place(written);
		return placed === written ? path : placed;
	}

	#takeFromFolder({ key, value, from, fixed }: FolderValue): void {
		if (key in this.#raw && fixed && !sameValue(key, this.#raw, value)) {
			const message = `${from} says ${JSON.stringify(value)}`;
			this.#problems.push(problem(key, this.#raw[key], this.#origins[key], message));
			// With the folder's value in its place, the other checks are of the folder's model.
			delete this.#raw[key];
		}
		if (!(key in this.#raw)) this.#take(key, value, { source: "folder", file: from });
	}

	#refuse(key: Key, message: string): void {
		const value = key in this.#raw ? this.#raw[key] : this.#draft.valueOf(key);
		this.#problems.push(problem(key, value, this.#origins[key], message));
		this.#refused.add(key);
		this.#draft.refuse(key);
	}

	#lack(key: Key): void {
		if (this.#knowsMissing) this.#problems.push(missing(key));
	}

	#inspect(list: readonly Check[]): void {
		for (const check of list) {
			const complaint = this.#draft.read(check);
			if (complaint && !this.#refused.has(complaint.key)) this.#refuse(complaint.key, complaint.message);
		}
	}
}

function missing(key: Key): Problem {
	const { type, derivation } = fieldOf(key);
	const why = derivation?.includes("required") ? ` (${derivation})` : "";
	const ofModel = key in modelKeys && fieldOf(key).model !== false;
	const places = ofModel ? "a preset, a file, or a model's folder with --load-hf" : "a preset or a file";
	return { where: key, message: `it is missing${why}; give ${type.allowed} (flag --${key}, ${places})` };
}

/** Keys that name folders of weights. */
const folderKeys: readonly Key[] = ["load-hf", "load-vision", "load-projector", "load-peft"];

/** Whether a given value equals a folder's. Pipeline cuts and repetition of MTP depths do not make another model. */
function sameValue(key: Key, raw: Partial<Record<Key, unknown>>, ofFolder: unknown): boolean {
	const given = raw[key];
	if (key !== "hybrid-layer-pattern" || typeof given !== "string") return Bun.deepEquals(given, ofFolder);
	const stored = (pattern: string) => storedPattern(pattern, { repeated: raw["mtp-use-repeated-layer"] === true });
	return stored(given) === stored(String(ofFolder));
}

/** The end of a sentence about a value of the wrong type or outside its bounds. */
function disallowed(key: Key, value: unknown): string {
	const { type } = fieldOf(key);
	const huge = typeof value === "number" && value > Number.MAX_SAFE_INTEGER && type.placeholder === "INTEGER";
	if (huge) return `allowed is ${type.allowed} and at most ${Number.MAX_SAFE_INTEGER}`;
	const unbuilt = [value].flat().find((item) => typeof item === "string" && type.notBuilt.includes(item));
	return unbuilt === undefined
		? `allowed is ${type.allowed}`
		: `${unbuilt} is not built yet; allowed is ${type.allowed}`;
}

/** A mistake in a value: the place where it was given, the value, and the allowed ones. */
function problem(key: Key, value: unknown, origin: Origin, message: string): Problem {
	// JSON.stringify writes an infinite number as null.
	const shown = typeof value === "number" ? String(value) : JSON.stringify(value);
	const sentence = `is ${shown}; ${message}`;
	switch (origin.source) {
		case "flag":
			return { where: origin.name, message: `the value ${sentence}` };
		case "file":
			return { where: describeOrigin(origin), message: `${key} ${sentence}` };
		case "default":
			return value === null ? { where: key, message } : { where: `${key} (default)`, message: `the value ${sentence}` };
		default:
			return { where: `${key} (${describeOrigin(origin)})`, message: `the value ${sentence}` };
	}
}

function report(problems: readonly Problem[]): string {
	const lines = problems.map(({ where, message }) => `${where}: ${message}.`);
	return lines.length === 1
		? lines[0]!
		: `${lines.length} mistakes in the configuration:\n${lines.map((line) => `  ${line}`).join("\n")}`;
}

function notesOn(given: readonly Entry[], configuration: TrainingConfiguration): string[] {
	const notes: string[] = [];
	const names = [...new Set(given.map(({ key }) => key))];
	const always = names.filter((key) => fieldOf(key).alwaysOn);
	if (always.length > 0) notes.push(`Always so here: ${always.join(", ")}.`);
	const without = names.filter((key) => fieldOf(key).noEffect !== undefined);
	if (without.length > 0) {
		notes.push(`Without effect here: ${without.map((key) => `${key} (${fieldOf(key).noEffect})`).join(", ")}.`);
	}
	if (configuration.saveInterval !== null && configuration.save === null) {
		notes.push(`save-interval ${configuration.saveInterval} has no effect without save.`);
	}
	const shards = weightShards(configuration);
	if (shards.dense > 1 || shards.expert > 1) {
		notes.push(
			`Weight shards run as extra data parallelism with the same ${counted(dataLanes(configuration), "data lane")}: a rank holds whole what Megatron cuts into ${shards.dense} (dense) and ${shards.expert} (expert) shards.`,
		);
	}
	const { segments, mtp } = parsePattern(configuration.hybridLayerPattern);
	const layers = segments.flat(2).length;
	if (configuration.numLayers !== layers) {
		notes.push(
			`num-layers is ${configuration.numLayers}, but hybrid-layer-pattern has ${counted(layers, "layer")}, which counts.`,
		);
	}
	const depths = mtp?.depths ?? 0;
	if (configuration.mtpNumLayers !== depths) {
		notes.push(
			`mtp-num-layers is ${configuration.mtpNumLayers}, but hybrid-layer-pattern has ${depths} MTP depths, which counts.`,
		);
	}
	return notes;
}
