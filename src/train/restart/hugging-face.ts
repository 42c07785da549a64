/** Starting from Hugging Face folders (--load-hf, --load-vision, --load-projector), and leaving one behind (--save-hf). */
import { join } from "node:path";
import {
	type Companions,
	ConvertedStore,
	defaultShardBytes,
	failureOfAny,
	GatheredTensors,
	isFloatDtype,
	isStoreUrl,
	type KeptFolder,
	keptInSource,
	keptOf,
	type LanguageModelConfiguration,
	lackingOfImages,
	languageKey,
	loadModel,
	mayWriteTo,
	mergeAdapters,
	type NamedTensors,
	openPretrained,
	ownershipFile,
	ownershipText,
	type Pretrained,
	type ProjectorSizes,
	parsePythonJson,
	planFolder,
	projectorPrefix,
	scaleOf,
	shareOf,
	towerPrefix,
	withAddresses,
	withoutAdapters,
	withoutTokenizer,
	writeFileAtomically,
	writeFolder,
} from "../../checkpoint/index.ts";
import { hasEncoder, projectorInput } from "../../config/derive.ts";
import { storedPattern } from "../../config/hybrid-pattern.ts";
import { lackingOfPublished } from "../../config/published-model.ts";
import { requireSameModel } from "../../config/same-model.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { readChatTemplate } from "../../data/text/chat/template-file.ts";
import { savedTokenizer } from "../../data/text/configured-tokenizer.ts";
import { routerPrefix } from "../../guests/elastic/router/network.ts";
import { exchangeTexts, type Group, groupOfOne, type World } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import type { Run } from "../assemble.ts";
import type { Provenance } from "./starting-point.ts";

/** The folders that a run starts from, compared with its configuration; null: no folder is given. */
export function openFolders(c: TrainingConfiguration): Pretrained | null {
	const pretrained = openPretrained(c, hasEncoder(c) ? c.visionNumAttentionHeads : null);
	try {
		for (const { from, keys } of pretrained?.descriptions ?? []) requireSameModel(from, keys, { ...c });
	} catch (error) {
		pretrained?.[Symbol.dispose]();
		throw error;
	}
	return pretrained;
}

/** The projector of a run; null: one that published models do not have. */
export function projectorSizesOf(c: TrainingConfiguration): ProjectorSizes | null {
	if (c.visionProjectionType !== "mlp") return null;
	const { visionProjectionNorm, visionProjectionNormalization, visionProjectionActivation, visionProjectionBias } = c;
	const { visionProjectionStem } = c;
	return {
		...({ visionProjectionType: "mlp", visionProjectionNorm, visionProjectionNormalization } as const),
		...{ visionProjectionActivation, visionProjectionBias, visionProjectionStem, output: c.hiddenSize },
		deepstack: c.deepstackVisualIndexes?.length ?? 0,
		...{ input: projectorInput(c), visionProjectionFfnHiddenSize: c.visionProjectionFfnHiddenSize },
	};
}

/** The parts kept of the folders that a run starts from, for folders and checkpoints that are written later. */
export function keptOfFolders(c: TrainingConfiguration, pretrained: Pretrained, beside: boolean): KeptFolder | null {
	const kept = keptOf(pretrained, {
		...{ beside, imageTokenId: c.imageTokenId },
		projector: projectorSizesOf(c),
	});
	return kept && { ...kept, companions: withText(kept.companions, c) };
}

/** Fills this rank's modules with the weights of the folders' parts. */
export function loadFolders(
	run: Pick<Run, "language" | "encoder">,
	{ language, tower, projector, weights }: Pretrained,
): void {
	const load = (module: NamedTensors | null, prefix: string) => {
		if (module !== null) loadModel(partOf(withoutAdapters(module), prefix), weights, true);
	};
	if (language) load(run.language, "language_model.");
	if (tower) load(run.encoder, towerPrefix);
	if (projector) load(run.encoder, projectorPrefix);
}

export class HuggingFaceWeights implements Disposable {
	#pretrained: Pretrained | null = null;

	private constructor(
		private readonly c: TrainingConfiguration,
		private readonly run: Run,
		/** Ranks that hold the model and write it together. */
		private readonly holders: Group,
	) {}

	/** Every rank of the world calls this together. */
	static async open(c: TrainingConfiguration, run: Run, world: World): Promise<HuggingFaceWeights> {
		const { encoders, language } = run.topology;
		const ranks = encoders.length === 0 ? language.ranks : [...Array(world.size).keys()];
		const several = c.saveHf !== null && ranks.length > 1 && ranks.includes(world.rank);
		const holders = several ? await world.group("model", ranks) : groupOfOne("model", world.rank);
		return new HuggingFaceWeights(c, run, holders);
	}

	/** Initial values: drawn from the seed, those of the folders' parts from there. Returns what the user should know. */
	load(): string[] {
		const { c, run } = this;
		run.initialise(c.seed);
		const pretrained = openFolders(c);
		this.#pretrained = pretrained;
		if (pretrained === null) return [];
		loadFolders(run, pretrained);
		const { language, tower, projector } = pretrained;
		const from = (what: string, parts: { readonly path: string } | null) =>
			parts === null ? `a new ${what}` : `${what} of ${withAddresses(parts.path)}`;
		const vision = hasEncoder(c) ? [from("vision tower", tower), from("projector", projector)] : [];
		return [`Weights: ${[from("language model", language), ...vision].join(", ")}.`, ...pretrained.notices];
	}

	/**
	 * Writes the trained model to --save-hf, under the names and with the files it came with; of a run that goes on from a
	 * checkpoint, `provenance` knows them. Every rank of the run calls this together. `lineage` names the training; `warn`
	 * hears of a folder that has come there meanwhile, which stays: the model goes beside it.
	 */
	async save(provenance: Provenance, lineage: string, warn: (sentence: string) => void): Promise<void> {
		const { c, run } = this;
		if (c.saveHf === null) return;
		if (run.topology.encoders.length === 0 && run.language === null) return;
		const path = await freePath(c.saveHf, lineage, this.holders);
		if (path !== c.saveHf && this.holders.rank === 0) {
			warn(`--save-hf ${c.saveHf} came to exist while this run trained: writing ${path}.`);
		}
		const parent = partsOf(run, (name) => !name.startsWith(routerPrefix));
		using weights = new GatheredTensors(path, parent, this.holders, run.state.scalars.device);
		await this.#write(path, weights, provenance, lineage);
	}

	/** Throws a UserError where the folder of --save-hf could not say how images were made. */
	requireImages(provenance: Provenance): void {
		requireImages(this.c, this.#kept(provenance));
	}

	/** The kept part of the folder that the model came from; null: it came from none. */
	#kept(provenance: Provenance): KeptFolder | null {
		const { c } = this;
		const pretrained = this.#pretrained;
		return pretrained === null ? keptInSource(provenance, c.saveHf ?? "") : keptOfFolders(c, pretrained, false);
	}

	/** Every rank writes a part, in a folder that the first makes and names. */
	async #write(path: string, gathered: GatheredTensors, provenance: Provenance, lineage: string): Promise<void> {
		const { c, holders } = this;
		const pretrained = this.#pretrained;
		const kept = this.#kept(provenance);
		const weights = mergeAdapters(gathered, scaleOf(c));
		const model = {
			path,
			weights: new ConvertedStore(weights, dtypesOf(pretrained, kept)),
			language: languageKeys(c),
			described: { ...c },
			kept,
			companions: withText(kept?.companions ?? new Map(), c),
		};
		const planned = planFolder(model, path, { names: null, visionHeads: null, shardBytes: defaultShardBytes });
		const first = holders.rank === 0;
		const write = (folder: string) => {
			const [shared] = exchangeTexts(holders, first ? folder : "") as [string];
			// What goes to a store lies on one host before.
			const rounds = shareOf(planned.tensors, gathered, isStoreUrl(path));
			planned.write(shared, () => {}, { first, rounds, barrier: () => holders.barrier() });
		};
		await writeTogether(path, { lineage, staging: c.stagingDir }, holders, write);
	}

	[Symbol.dispose](): void {
		this.#pretrained?.[Symbol.dispose]();
	}
}

/**
 * The path that a training may write its folder to: `path`, or one beside it where another folder has come there. Every rank of `holders`
 * calls this together.
 */
export async function freePath(path: string, lineage: string, holders: Group): Promise<string> {
	let free = true;
	const look = async () => {
		free = await mayWriteTo(path, lineage);
	};
	const failure = await failureOfAny(holders, holders.rank === 0 ? look() : Promise.resolve());
	if (failure !== null) throw new UserError(failure);
	return exchangeTexts(holders, free ? path : `${path}-${lineage}`)[0]!;
}

/**
 * Writes a folder by way of all ranks of `holders`, which call this together, and names its training in it. `write` fills what the first
 * makes, before it returns; every rank stays until the folder is where it belongs.
 */
export async function writeTogether(
	path: string,
	{ lineage, staging }: { readonly lineage: string; readonly staging: string | null },
	holders: Group,
	write: (folder: string) => void,
): Promise<void> {
	if (holders.rank !== 0) write("");
	let filled = holders.rank !== 0;
	const fill = (folder: string) => {
		write(folder);
		const text = new TextEncoder().encode(ownershipText(lineage));
		writeFileAtomically(join(folder, ownershipFile), (file) => file.write(text));
		filled = true;
	};
	const work = holders.rank === 0 ? writeFolder(path, { lineage, replace: true, staging }, fill) : Promise.resolve();
	// The others wait in `write`.
	if (!filled) await work;
	const failure = await failureOfAny(holders, work);
	if (failure !== null) throw new UserError(failure);
}

/** The tensors of a module whose names begin so. */
export function partOf(module: NamedTensors, prefix: string): NamedTensors {
	return partsOf(module, (name) => name.startsWith(prefix));
}

/** The tensors of a module with such names. */
function partsOf(module: NamedTensors, wanted: (name: string) => boolean): NamedTensors {
	return {
		*logicalTensors() {
			for (const tensor of module.logicalTensors()) {
				if (wanted(tensor.name)) yield tensor;
				else {
					tensor.value[Symbol.dispose]();
					tensor.gradient?.[Symbol.dispose]();
				}
			}
		},
	};
}

/** Throws a UserError where the folder of --save-hf could not say what the model is, or how images were made. `kept`: of the folder it comes from. */
export function requireImages(c: TrainingConfiguration, kept: KeptFolder | null): void {
	if (c.saveHf === null || !hasEncoder(c)) return;
	const files = { configText: kept?.configText ?? "{}", companions: kept?.companions ?? new Map() };
	const isWhole = kept !== null && languageKey(parsePythonJson(kept.configText, c.saveHf)) !== null;
	const lacking = (isWhole ? null : lackingOfPublished(c)) ?? lackingOfImages(files, c, c.saveHf);
	if (lacking !== null) throw new UserError(`--save-hf ${c.saveHf}: ${lacking}.`);
}

/** With the tokenizer and the chat template that the data are read with. */
export function withText(companions: Companions, c: TrainingConfiguration): Companions {
	const { tokenizer, chatTemplate, conversationTemplate } = c;
	const own = savedTokenizer(c);
	// A tokenizer of another folder replaces the model's, template and all.
	const kept = own.size === 0 ? companions : withoutTokenizer(companions);
	const files = new Map([...kept, ...own]);
	if (chatTemplate === null || conversationTemplate !== "jinja") return files;
	const { text } = readChatTemplate(chatTemplate, tokenizer);
	return new Map([...files, ["chat_template.jinja", new TextEncoder().encode(text)]]);
}

/** Types as the folders had them; a new part as the embedding, or as config.json says. */
function dtypesOf(pretrained: Pretrained | null, kept: KeptFolder | null) {
	const own = pretrained?.weights.tensors;
	const word = /"(?:torch_)?dtype":\s*"(bfloat16|float16)"/.exec(kept?.configText ?? "")?.[1];
	const said = word === undefined ? "F32" : word === "float16" ? "F16" : "BF16";
	const other = own?.get("language_model.embedding.word_embeddings.weight")?.dtype ?? said;
	return (name: string, { dtype }: { readonly dtype: Parameters<typeof isFloatDtype>[0] }) => {
		if (!isFloatDtype(dtype)) return dtype;
		return own?.get(name)?.dtype ?? (/\.(expert_bias|A_log|D|dt_bias)$/.test(name) ? dtype : other);
	};
}

/** The keys of the language model. */
export function languageKeys(c: TrainingConfiguration): LanguageModelConfiguration {
	return {
		...c,
		hybridLayerPattern: storedPattern(c.hybridLayerPattern, { repeated: c.mtpUseRepeatedLayer }),
		moeRouterScoreFunction: c.moeRouterScoreFunction as "sigmoid" | "softmax",
	};
}
