/**
 * `mimo convert-ckpt --from F --to F SOURCE TARGET` converts a checkpoint; `mimo convert-ckpt inspect PATH` lists one.
 * Formats: hf (a Hugging Face folder), native, torch_dist (Megatron).
 */
import { defineCommand } from "citty";
import {
	adaptedModel,
	type ConversionOptions,
	damages,
	formatBytes,
	formatInspection,
	formatPlanLine,
	formats,
	inspectCheckpoint,
	isStoreUrl,
	layerNameKinds,
	type NativeLayout,
	type NewLayerOptions,
	openPeftFolder,
	openSource,
	placedFolder,
	planConversion,
	planLines,
	requireEmpty,
	requireEqual,
	requireFormat,
	type SourceCheckpoint,
	type SourceOptions,
	type SpellingName,
	spellings,
	type TargetName,
	withAddresses,
} from "../checkpoint/index.ts";
import { permutedSource, readImportance } from "../guests/elastic/importance/importance.ts";
import { remark, warn } from "../observe/messages.ts";
import { print } from "../observe/output.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { programVersion } from "../system/program-version.ts";
import { type Arguments, bytesOf, choice, dtypeOf, list, text, whole } from "./arguments.ts";
import { ByteProgress } from "./byte-progress.ts";

const newLayer = (what: string) =>
	({ type: "string", description: `${what} of the Mamba-2 layers that a GPT model gets.` }) as const;

/** peft is a target alone: a PEFT folder holds adapters, not a model. */
const targets = [...formats, "peft"] as const;

const args = {
	source: {
		type: "positional",
		required: false,
		description: "Checkpoint to convert; or inspect, before the PATH to list.",
	},
	target: { type: "positional", required: false, description: "Folder to write." },
	from: { type: "string", valueHint: formats.join("|"), description: "Format of SOURCE; unset: recognised." },
	to: { type: "string", valueHint: targets.join("|"), description: "Format of TARGET; peft: low-rank adapters alone." },
	adapters: {
		type: "string",
		description: "PEFT folder whose low-rank adapters are merged into the weights of SOURCE.",
	},
	permute: {
		type: "string",
		description:
			"Ranking of `mimo elastic rank`, by which embedding channels, heads, experts and their channels are sorted.",
	},
	"dry-run": { type: "boolean", description: "Print the plan, every tensor's source, shape and dtype; write nothing." },
	verify: { type: "boolean", description: "Read both sides again and compare every value." },
	sync: {
		type: "boolean",
		description: "Wait until the files are on the disk; unset: the system writes them later, as with cp.",
	},
	force: { type: "boolean", description: "Replace a target that is not empty." },
	optimizer: {
		type: "boolean",
		default: true,
		description: "Convert optimizer state too, where both formats have it.",
	},
	dtype: {
		type: "string",
		valueHint: "F32|BF16|F16",
		description: "Float type of the written weights; unset: as stored.",
	},
	"hf-names": {
		type: "string",
		valueHint: "published|transformers",
		description: "Spelling of a Hugging Face target.",
	},
	"hf-reference": { type: "string", description: "Folder whose config.json, tokenizer and code TARGET gets." },
	experts: {
		type: "string",
		valueHint: "indexed|grouped",
		default: "indexed",
		description: "Native target: experts indexed, or grouped in a tensor.",
	},
	"layer-names": {
		type: "string",
		valueHint: "physical|logical|gpt",
		description:
			"Numbering of the target's layers: physical, logical (a bracket group counts as one layer) or gpt (torch_dist only); unset: the source's.",
	},
	"hybrid-layer-pattern": {
		type: "string",
		description: "Layer pattern with its groups, where SOURCE lacks it.",
	},
	"glu-interleave-size": {
		type: "string",
		description: "Native target: rows of the blocks in which gate and linear halves alternate.",
	},
	"padded-vocab-size": { type: "string", description: "Rows of embedding and output layer; unset: as stored." },
	"max-shard-size": { type: "string", default: "5GB", description: "Largest file of the target, such as 500MB." },
	"megatron-wrappers": { type: "string", description: "torch_dist target: number of module. prefixes of its keys." },
	...{ "mamba-num-heads": newLayer("Heads"), "mamba-head-dim": newLayer("Width of a head") },
	...{ "mamba-num-groups": newLayer("Groups"), "mamba-state-dim": newLayer("Size of the state") },
	seed: { type: "string", default: "1234", description: "Seed of the values of new Mamba-2 layers." },
	"vision-num-attention-heads": {
		type: "string",
		description: "Heads of the vision tower, where SOURCE lacks them.",
	},
	drop: { type: "string", description: "Leave out tensors whose names match one of these globs, separated by commas." },
	"allow-pickle-class": {
		type: "string",
		description: "Further classes that a pickle may name (module.Class,…).",
	},
	"staging-dir": {
		type: "string",
		description: "Folder on a disk of this host for copies of what is in stores; unset: the user's cache folder.",
	},
	"allow-fallback": { type: "boolean", description: "Read an older checkpoint when the newest is damaged." },
	checksums: { type: "boolean", default: true, description: "inspect: compute the SHA-256 of every tensor." },
	json: { type: "boolean", description: "Print the plan or the listing as JSON." },
} as const;

export default defineCommand({
	meta: {
		name: "convert-ckpt",
		description: "Convert a checkpoint: [flags] SOURCE TARGET, or list one: inspect PATH.",
	},
	args,
	run: async ({ args: given }) => {
		const parsed = given as unknown as Arguments;
		const [first, second, ...surplus] = parsed._;
		if (first === "inspect") inspect(requirePath(second, surplus, "convert-ckpt inspect PATH"), parsed);
		else {
			const target = requirePath(second, surplus, "convert-ckpt --from F --to F SOURCE TARGET");
			await convert(placedFolder(first!, text(parsed, "staging-dir")), target, parsed);
		}
	},
});

function requirePath(path: string | undefined, surplus: readonly string[], form: string): string {
	if (path === undefined || surplus.length > 0) {
		throw new UserError(
			`The command is \`mimo ${form}\`; \`mimo convert-ckpt --help\` lists its flags.`,
			exitCodes.usage,
		);
	}
	return path;
}

function inspect(path: string, given: Arguments): void {
	const progress = new ByteProgress("reading", null);
	const found = inspectCheckpoint(placedFolder(path, text(given, "staging-dir")), {
		checksums: given.checksums !== false,
		allowFallback: given["allow-fallback"] === true,
		onBytes: (bytes) => progress.add(bytes),
	});
	const inspection = { ...found, path: withAddresses(found.path) };
	progress.done();
	for (const notice of inspection.notices) warn(notice);
	if (given.json) print(JSON.stringify(inspection, null, 2));
	else for (const line of formatInspection(inspection)) print(line);
	const [first, ...others] = damages(inspection);
	if (first === undefined) return;
	throw new UserError(others.length === 0 ? first : `${first} (${others.length} more are damaged.)`);
}

async function convert(source: string, target: string, given: Arguments): Promise<void> {
	const to = choice(given, "to", targets);
	if (to === null) throw new UserError(`--to is missing; allowed is ${targets.join(", ")}.`, exitCodes.usage);
	const staging = text(given, "staging-dir");
	const placed = (name: string) => {
		const path = text(given, name);
		return path === null ? null : placedFolder(path, staging);
	};
	if (given.force !== true) await requireEmpty(target);
	const options: ConversionOptions = {
		...sourceOptions(given),
		from: requireFormat(source, choice(given, "from", formats)),
		to,
		source,
		target,
		adapters: placed("adapters"),
		force: given.force === true,
		staging,
		sync: given.sync === true,
		dtype: dtypeOf(given),
		names: choice(given, "hf-names", Object.keys(spellings) as SpellingName[]),
		reference: placed("hf-reference"),
		...namesOf(given, to),
		wrapper: wrapperOf(given),
		paddedVocabularySize: whole(given, "padded-vocab-size"),
		shardBytes: bytesOf(text(given, "max-shard-size") ?? "5GB"),
		drop: list(given, "drop"),
		generator: `mimo ${programVersion()}`,
	};
	using planned = planConversion(options, permuted(options, text(given, "permute")));
	for (const sentence of planned.notices) remark(withAddresses(sentence));
	for (const sentence of planned.warnings) warn(withAddresses(sentence));
	if (given["dry-run"]) {
		const lines = planLines(planned.tensors);
		if (given.json) print(JSON.stringify(lines, null, 2));
		else for (const line of lines) print(formatPlanLine(line));
		if (!given.json) print(`${counted(lines.length, "tensor")}, ${formatBytes(planned.bytes)}; nothing was written.`);
		return;
	}
	const start = performance.now();
	const progress = new ByteProgress("writing", planned.bytes);
	const written = await planned.run((bytes) => progress.add(bytes));
	progress.done();
	const seconds = (performance.now() - start) / 1000;
	print(
		`${written}: ${counted(planned.tensors.tensors.size, "tensor")}, ${formatBytes(planned.bytes)} in ${seconds.toFixed(1)} s.`,
	);
	if (given.verify) verify(planned, await readable(target, written, staging), options);
}

/** Where a written target is read: what is in a store comes back from there. */
async function readable(target: string, written: string, staging: string | null): Promise<string> {
	if (!isStoreUrl(target)) return written;
	const { bringCopy } = await import("../checkpoint/remote/folder-copy.ts");
	await bringCopy({ url: target, staging, iteration: null });
	return placedFolder(target, staging);
}

/** The source sorted by a ranking; null without --permute. */
function permuted(options: ConversionOptions, ranking: string | null): SourceCheckpoint | null {
	if (ranking === null) return null;
	if (options.adapters !== null) {
		throw new UserError(
			"--permute is not allowed with --adapters, which fit the unsorted model: merge them first.",
			exitCodes.usage,
		);
	}
	const importance = readImportance(ranking);
	const source = openSource(options.source, options.from, options);
	try {
		return permutedSource(source, importance, ranking);
	} catch (error) {
		source[Symbol.dispose]();
		throw error;
	}
}

function verify(planned: ReturnType<typeof planConversion>, written: string, options: ConversionOptions): void {
	const progress = new ByteProgress("comparing", planned.bytes);
	const { to } = options;
	const pattern = planned.otherNames ? null : options.pattern;
	using again =
		to === "peft"
			? openPeftFolder(written, adaptedModel(planned.source)!)
			: openSource(written, to, { ...options, pattern, allowFallback: false });
	const [own, other] =
		planned.otherNames && "stored" in again ? [planned.tensors, again.stored] : [planned.weights, again.weights];
	const { count, notFinite } = requireEqual(own, other, (bytes) => progress.add(bytes));
	progress.done();
	print(`Verified: ${count} tensors are equal on both sides.`);
	if (notFinite.length === 0) return;
	warn(
		`${counted(notFinite.length, "tensor")} of ${written} with infinite values or NaN: ${notFinite[0]}${notFinite.length > 1 ? ", …" : ""}.`,
	);
}

function sourceOptions(given: Arguments): SourceOptions {
	return {
		optimizer: given.optimizer !== false,
		allowFallback: given["allow-fallback"] === true,
		visionHeads: whole(given, "vision-num-attention-heads"),
		newLayers: newLayersOf(given),
		pattern: text(given, "hybrid-layer-pattern"),
		inert: list(given, "allow-pickle-class").map((name) => name.replace(/\.([^.]+)$/, " $1")),
	};
}

function newLayersOf(given: Arguments): NewLayerOptions {
	const sizes = ["mamba-num-heads", "mamba-head-dim", "mamba-num-groups", "mamba-state-dim"].flatMap((name) => {
		const size = whole(given, name);
		return size === null ? [] : [[name.replaceAll("-", "_"), size] as const];
	});
	return { seed: whole(given, "seed") ?? 1234, sizes: Object.fromEntries(sizes) };
}

/** Names and layout of the target. torch_dist finds its layer names itself; a native target needs them given. */
function namesOf(given: Arguments, to: TargetName): Pick<ConversionOptions, "layout" | "layerNames"> {
	const layerNames = choice(given, "layer-names", layerNameKinds);
	const block = whole(given, "glu-interleave-size") ?? 0;
	const pattern = text(given, "hybrid-layer-pattern");
	if (layerNames === "gpt" && to !== "torch_dist") {
		throw new UserError("--layer-names gpt needs --to torch_dist.", exitCodes.usage);
	}
	const logical = layerNames === "logical" && to !== "torch_dist";
	if (logical && pattern === null) {
		throw new UserError("--layer-names logical needs the groups: --hybrid-layer-pattern.", exitCodes.usage);
	}
	const layout: NativeLayout = {
		layerNames: logical ? "logical" : "physical",
		pattern: logical ? pattern : null,
		experts: choice(given, "experts", ["indexed", "grouped"] as const) ?? "indexed",
		glu: { experts: block, sharedExperts: block },
	};
	return { layerNames, layout };
}

function wrapperOf(given: Arguments): string | null {
	const count = whole(given, "megatron-wrappers");
	return count === null ? null : "module.".repeat(count);
}
