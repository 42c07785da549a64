/** Starting from adapters in a PEFT folder (--load-peft), and leaving them behind in one (--save-peft). */

import { join } from "node:path";
import { writeFileAtomically } from "../../checkpoint/files.ts";
import { writeFolderAtomically } from "../../checkpoint/folders.ts";
import { gatherTensors } from "../../checkpoint/gathered-store.ts";
import { detectSpelling } from "../../checkpoint/hf/families/index.ts";
import { HuggingFaceFolder } from "../../checkpoint/hf/folder.ts";
import { mayWrite, ownershipFile, ownershipText } from "../../checkpoint/hf/ownership.ts";
import { openPeftFolder, type PeftAdapters, planPeftFolder } from "../../checkpoint/lora/peft-folder.ts";
import { moduleSpelling, peftCorrespondence } from "../../checkpoint/lora/peft-names.ts";
import { adaptersOf } from "../../checkpoint/lora/tensors.ts";
import { loadModel, ValueStore } from "../../checkpoint/model-store.ts";
import { hasEncoder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { hybridConfig } from "../../models/hybrid/from-configuration.ts";
import { isTarget } from "../../models/hybrid/lora.ts";
import { hybridParameters } from "../../models/hybrid/names.ts";
import { logicalNames } from "../../models/parameter-spec.ts";
import type { Group } from "../../parallel/group.ts";
import type { World } from "../../parallel/world.ts";
import { UserError } from "../../system/errors.ts";
import type { Run } from "../assemble.ts";
import { languageKeys } from "./hugging-face.ts";

/** The folder of --load-peft, which gives the run its rank and α; null: no folder is given. */
export function openAdapters(c: TrainingConfiguration): PeftAdapters | null {
	if (c.loadPeft === null) return null;
	const adapters = openPeftFolder(c.loadPeft, languageKeys(c));
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
	const weights = hybridParameters(config)
		.flatMap(logicalNames)
		.filter((name) => isTarget(config.lora!, name));
	peftCorrespondence(weights, c.loraRank!, languageKeys(c), spellingOf(c), `--save-peft ${c.savePeft}`);
}

export class PeftWeights {
	private constructor(
		private readonly c: TrainingConfiguration,
		private readonly run: Run,
		/** Ranks of the language model where adapters are to be saved from several; null on others. */
		private readonly language: Group | null,
	) {}

	/** Every rank of the world calls this together. */
	static async open(c: TrainingConfiguration, run: Run, world: World): Promise<PeftWeights> {
		const { ranks } = run.topology.language;
		const several = c.savePeft !== null && ranks.length > 1 && ranks.includes(world.rank);
		return new PeftWeights(c, run, several ? await world.group("adapters", ranks) : null);
	}

	/** Initial values of --load-peft, where that is given. */
	load(): void {
		if (this.run.language === null) return;
		using adapters = openAdapters(this.c);
		if (adapters === null) return;
		loadModel(adaptersOf(this.run.language), adapters.weights, this.run.topology.language.size > 1);
	}

	/**
	 * Writes the trained adapters to --save-peft. Every rank of the run calls this together. `lineage` names the training;
	 * `warn` hears what the user should know.
	 */
	async save(lineage: string, warn: (sentence: string) => void): Promise<void> {
		const { c, run } = this;
		if (c.savePeft === null || run.language === null) return;
		const path = mayWrite(c.savePeft, lineage) ? c.savePeft : `${c.savePeft}-${lineage}`;
		if (path !== c.savePeft) warn(`--save-peft ${c.savePeft} came to exist while this run trained: writing ${path}.`);
		const adapters = adaptersOf(run.language);
		using weights =
			this.language === null
				? new ValueStore(path, adapters)
				: gatherTensors(path, adapters, this.language, run.language.device, (tensor) => run.counts(tensor));
		if (weights !== null) {
			const settings = { rank: c.loraRank!, alpha: c.loraAlpha, dropout: c.loraDropout };
			const options = { spelling: spellingOf(c), base: c.loadHf, path };
			const planned = planPeftFolder(weights, settings, languageKeys(c), options);
			for (const sentence of planned.warnings) warn(sentence);
			await writeFolderAtomically(path, { replace: true }, (folder) => {
				planned.write(folder);
				const text = new TextEncoder().encode(ownershipText(lineage));
				writeFileAtomically(join(folder, ownershipFile), (file) => file.write(text));
			});
		}
		// Every rank stays until the files are there.
		this.language?.barrier();
	}
}

/** As the modules of the model that the adapters are for are spelled. */
function spellingOf(c: TrainingConfiguration) {
	const whole = hasEncoder(c);
	if (c.loadHf === null) return moduleSpelling({ stored: null, configText: null, whole });
	using folder = HuggingFaceFolder.open(c.loadHf);
	return moduleSpelling({ stored: detectSpelling(folder.tensors.keys()), configText: folder.configText, whole });
}
