/** Starting from, and leaving behind, a Hugging Face NemotronH folder (--load-hf, --save-hf). */

import { gatherTensors } from "../../checkpoint/gathered-store.ts";
import type { LanguageModelConfiguration } from "../../checkpoint/hf/configuration.ts";
import { spellings } from "../../checkpoint/hf/language-names.ts";
import { openHuggingFaceModel, saveHuggingFaceModel } from "../../checkpoint/hf/model.ts";
import { mayWrite } from "../../checkpoint/hf/ownership.ts";
import { loadModel, ValueStore } from "../../checkpoint/model-store.ts";
import type { TensorStore } from "../../checkpoint/store.ts";
import { withoutCuts } from "../../config/hybrid-pattern.ts";
import { requireSameModel } from "../../config/same-model.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { HybridModel } from "../../models/hybrid/model.ts";
import type { Group } from "../../parallel/group.ts";
import type { World } from "../../parallel/world.ts";
import type { Run } from "../assemble.ts";

/** What a folder written later keeps of the one the weights came from. */
interface Origin {
	readonly configText: string;
	readonly spelling: (typeof spellings)[keyof typeof spellings];
}

export class HuggingFaceWeights {
	#origin: Origin | null = null;

	private constructor(
		private readonly c: TrainingConfiguration,
		private readonly run: Run,
		/** Ranks of the language model where it is to be saved from several; null on others. */
		private readonly language: Group | null,
	) {}

	/** Every rank of the world calls this together. */
	static async open(c: TrainingConfiguration, run: Run, world: World): Promise<HuggingFaceWeights> {
		const { ranks } = run.topology.language;
		const several = c.saveHf !== null && ranks.length > 1 && ranks.includes(world.rank);
		return new HuggingFaceWeights(c, run, several ? await world.group("language", ranks) : null);
	}

	/** Initial values: drawn from the seed, the language model's from --load-hf where that is given. */
	load(): void {
		const { c, run } = this;
		run.initialise(c.seed);
		if (c.loadHf === null || run.language === null) return;
		using source = openHuggingFaceModel(c.loadHf);
		requireSameModel(c.loadHf, { ...source.configuration }, { ...c });
		loadModel(run.language, source.weights, run.topology.language.size > 1);
		this.#origin = { configText: source.configText, spelling: source.spelling as Origin["spelling"] };
	}

	/**
	 * Writes the language model's trained weights to --save-hf, under the names and config.json they came with. Every rank
	 * of the run calls this together. `lineage` names the training; `warn` hears of a folder that has come there meanwhile,
	 * which stays: the weights go beside it.
	 */
	async save(lineage: string, warn: (sentence: string) => void): Promise<void> {
		const { c, run } = this;
		if (c.saveHf === null || run.language === null) return;
		const path = mayWrite(c.saveHf, lineage) ? c.saveHf : `${c.saveHf}-${lineage}`;
		if (path !== c.saveHf) warn(`--save-hf ${c.saveHf} came to exist while this run trained: writing ${path}.`);
		using weights = this.#wholeWeights(path, run.language);
		if (weights !== null) {
			const origin = this.#origin;
			await saveHuggingFaceModel(path, weights, languageKeys(c), {
				spelling: origin?.spelling ?? spellings.published,
				replace: true,
				lineage,
				...(origin ? { configText: origin.configText } : {}),
			});
		}
		// Nobody ends before the files are there.
		this.language?.barrier();
	}

	/** null on ranks that do not write. */
	#wholeWeights(path: string, model: HybridModel): TensorStore | null {
		if (this.language === null) return new ValueStore(path, model);
		return gatherTensors(path, model, this.language, (tensor) => this.run.counts(tensor));
	}
}

/** The keys of the language model. */
export function languageKeys(c: TrainingConfiguration): LanguageModelConfiguration {
	return {
		...c,
		hybridLayerPattern: withoutCuts(c.hybridLayerPattern),
		moeRouterScoreFunction: c.moeRouterScoreFunction as "sigmoid" | "softmax",
	};
}
