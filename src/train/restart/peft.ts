/** Starting from adapters in a PEFT folder (--load-peft), and leaving them behind in one (--save-peft). */
import {
	type AdaptedModel,
	adaptersOf,
	ConvertedStore,
	detectProjector,
	detectSpelling,
	detectTower,
	GatheredTensors,
	HuggingFaceFolder,
	keptInSource,
	languageType,
	loadModel,
	moduleSpelling,
	openPeftFolder,
	type PeftAdapters,
	parsePythonJson,
	peftCorrespondence,
	planPeftFolder,
	selectTensors,
	storedSpelling,
	withAddresses,
} from "../../checkpoint/index.ts";
import { hasEncoder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { hybridConfig } from "../../models/language/from-configuration.ts";
import { languageModelPrefix } from "../../models/language/layer-numbering.ts";
import { hybridParameters } from "../../models/language/names.ts";
import { isTarget, type LoraConfig, visionLora } from "../../models/lora.ts";
import { logicalNames, type ParameterSpec } from "../../models/parameter-spec.ts";
import { encoderConfig } from "../../models/vision/from-configuration.ts";
import { projectorParameters } from "../../models/vision/projector.ts";
import { visionEncoder } from "../../models/vit/tower.ts";
import { type Group, groupOfOne, type World } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import type { Run } from "../assemble.ts";
import { freePath, languageKeys, projectorSizesOf, writeTogether } from "./hugging-face.ts";
import type { Provenance } from "./starting-point.ts";

/** The folder of --load-peft, which gives the run its rank and α; null: no folder is given. */
export function openAdapters(c: TrainingConfiguration): PeftAdapters | null {
	if (c.loadPeft === null) return null;
	const adapters = openPeftFolder(c.loadPeft, adaptedModelOf(c));
	const [first] = adapters.stacked;
	if (first !== undefined) {
		adapters[Symbol.dispose]();
		throw new UserError(
			`${c.loadPeft} (load-peft) has a lora_A for each of ${first}, which are one projection here; \`mimo convert-ckpt --to hf --adapters ${c.loadPeft} BASE TARGET\` merges them into a base to start from.`,
		);
	}
	return adapters;
}

/** Throws a UserError where an adapter of the run has no place in the folder of --save-peft. */
export function requirePeftNames(c: TrainingConfiguration): void {
	if (c.savePeft === null) return;
	const config = hybridConfig(c);
	const adapted = (specs: readonly ParameterSpec[], lora: LoraConfig | null) =>
		specs.flatMap(logicalNames).filter((name) => lora !== null && isTarget(lora, name));
	const weights = adapted(hybridParameters(config), config.lora);
	if (hasEncoder(c)) {
		const { name, tower, projector } = visionEncoder(encoderConfig(c));
		weights.push(...adapted(tower.parameters(), tower.lora));
		weights.push(...adapted(projectorParameters(projector, name), projector.lora));
	}
	peftCorrespondence(weights, c.loraRank!, adaptedModelOf(c), spellingOf(c, null), `--save-peft ${c.savePeft}`);
}

/** The sizes of the run's model. */
function adaptedModelOf(c: TrainingConfiguration): AdaptedModel {
	if (!hasEncoder(c)) return languageKeys(c);
	const side = (pixels: number) => Math.floor(pixels / c.patchDim);
	const tower = { ...c, positions: side(c.visionMaxImgH) * side(c.visionMaxImgW) };
	return { ...languageKeys(c), vision: { tower, projector: projectorSizesOf(c) } };
}

/** Whether the tower or the projector has adapters. */
function adaptsEncoder(c: TrainingConfiguration): boolean {
	return visionLora(c, "vision_model") !== null || visionLora(c, "vision_projection") !== null;
}

/** Fills this rank's adapters from the folder of --load-peft; nothing without one. */
export function loadAdapters(c: TrainingConfiguration, { language, encoder, topology }: Run): void {
	using adapters = openAdapters(c);
	if (adapters === null) return;
	const ofLanguage = (name: string) => name.startsWith(languageModelPrefix);
	const others = selectTensors(adapters.weights, (name) => !ofLanguage(name));
	if (encoder !== null) loadModel(adaptersOf(encoder), others);
	if (language === null) return;
	const own = selectTensors(adapters.weights, ofLanguage);
	loadModel(adaptersOf(language), own, topology.language.size > 1);
}

export class PeftWeights {
	private constructor(
		private readonly c: TrainingConfiguration,
		private readonly run: Run,
		/** Ranks of the modules with adapters. */
		private readonly holders: Group,
	) {}

	/** Every rank of the world calls this together. */
	static async open(c: TrainingConfiguration, run: Run, world: World): Promise<PeftWeights> {
		const { language, encoders } = run.topology;
		const ranks = encoders.length > 0 && adaptsEncoder(c) ? [...Array(world.size).keys()] : language.ranks;
		const several = c.savePeft !== null && ranks.length > 1 && ranks.includes(world.rank);
		return new PeftWeights(c, run, several ? await world.group("adapters", ranks) : groupOfOne("adapters", world.rank));
	}

	/** Initial values of --load-peft, where that is given. */
	load(): void {
		loadAdapters(this.c, this.run);
	}

	/**
	 * Writes the trained adapters to --save-peft. Every rank of the run calls this together. `provenance`: of the base; `lineage` names the
	 * training; `warn` hears what the user should know.
	 */
	async save(provenance: Provenance, lineage: string, warn: (sentence: string) => void): Promise<void> {
		const { c, run } = this;
		if (c.savePeft === null || (run.language === null && this.holders.size === 1)) return;
		const path = await freePath(c.savePeft, lineage, this.holders);
		const first = this.holders.rank === 0;
		if (path !== c.savePeft && first) {
			warn(`--save-peft ${c.savePeft} came to exist while this run trained: writing ${path}.`);
		}
		using gathered = new GatheredTensors(path, adaptersOf(run), this.holders, run.state.scalars.device);
		gathered.fetch(this.holders.ranks.map((_, member) => (member === 0 ? [...gathered.tensors.keys()] : [])));
		const write = (folder: string) => {
			if (!first) return;
			const weights = new ConvertedStore(gathered, () => "F32");
			const settings = { rank: c.loraRank!, alpha: c.loraAlpha, dropout: c.loraDropout };
			const options = { spelling: spellingOf(c, provenance), base: c.loadHf && withAddresses(c.loadHf), path };
			const planned = planPeftFolder(weights, settings, adaptedModelOf(c), options);
			for (const sentence of planned.warnings) warn(sentence);
			planned.write(folder);
		};
		await writeTogether(path, { lineage, staging: c.stagingDir }, this.holders, write);
	}
}

/** As the modules of the model that the adapters are for are spelled. `provenance`: of a base without --load-hf; null: not known yet. */
function spellingOf(c: TrainingConfiguration, provenance: Provenance | null) {
	const whole = hasEncoder(c);
	if (c.loadHf === null) {
		const kept = provenance && keptInSource(provenance, c.savePeft!);
		const language = kept?.spelling.language ?? null;
		const stored = language && storedSpelling(language, kept!.spelling);
		return moduleSpelling({ stored, configText: kept?.configText ?? null, whole });
	}
	using folder = HuggingFaceFolder.open(c.loadHf);
	const json = parsePythonJson(folder.configText, folder.configPath);
	const language = detectSpelling(folder.tensors.keys(), languageType(json));
	const vision = { tower: detectTower(folder.tensors), projector: detectProjector(folder.tensors) };
	// Adapters of a tower that comes from elsewhere are of a model that is joined, as --save-hf writes it.
	if (language === null || (vision.tower === null && adaptsEncoder(c))) {
		return moduleSpelling({ stored: null, configText: null, whole });
	}
	return moduleSpelling({ stored: storedSpelling(language, vision), configText: folder.configText, whole });
}
