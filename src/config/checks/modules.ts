/** Checks of `modules`: names, placeholder tokens, grids and data of further encoders. */
import { dataLanes, hasEncoder, languageRanks } from "../derive.ts";
import { type ModuleConfiguration, moduleObjection, modulesOf } from "../modules.ts";
import type { TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

/** Checked first, because others read the entries. */
export const modulesAreLegal: Check = ({ modules }) => {
	const objection = moduleObjection(modules);
	return unless(objection === null, "modules", objection!);
};

/** A check of each encoder; the message names it. */
const each =
	(
		objection: (
			module: ModuleConfiguration,
			c: TrainingConfiguration,
			before: readonly ModuleConfiguration[],
		) => string | null,
	): Check =>
	(c) => {
		const all = modulesOf(c);
		const found = all.map((module, index) => objection(module, c, all.slice(0, index))).find((one) => one !== null);
		return unless(found === undefined, "modules", found!);
	};

const nested = (a: number, b: number) => a % b === 0 || b % a === 0;

export const moduleChecks: readonly Check[] = [
	each(({ name }, _, before) => {
		const taken = ["radio_encoder", "language", ...before.map((one) => one.name)];
		return taken.includes(name) ? `name ${name} is taken; every module has its own` : null;
	}),
	each(({ name, placeholderTokenId: id }, c, before) => {
		if (id >= c.vocabSize) return `placeholder-token-id ${id} of ${name} is outside vocab-size ${c.vocabSize}`;
		if (hasEncoder(c) && id === c.imageTokenId) return `placeholder-token-id ${id} of ${name} is image-token-id`;
		const other = before.find((one) => one.placeholderTokenId === id);
		return other ? `placeholder-token-id ${id} of ${name} is that of ${other.name}` : null;
	}),
	each(({ name, ranks, tp, dp }, c) => {
		const language = languageRanks(c);
		if (ranks === "own" || tp * dp === language) return null;
		return `tp × dp of ${name} is ${tp * dp}; on the language model's ranks allowed is their number (${language})`;
	}),
	each(({ name, dp }, c) => {
		const lanes = dataLanes(c);
		if (!nested(dp, lanes))
			return `dp of ${name} is ${dp}; allowed is a divisor or a multiple of the data lanes (${lanes})`;
		const sizes = [c.microBatchSize, c.evalMicroBatchSize];
		if (dp <= lanes || sizes.every((size) => (size * lanes) % dp === 0)) return null;
		return `dp of ${name} is ${dp}; allowed is a number that divides micro-batch-size × data lanes (${c.microBatchSize * lanes})`;
	}),
	each(({ name, tp, hiddenSize, projectionFfnHiddenSize: inner }, c) => {
		const cut = [hiddenSize, inner ?? c.hiddenSize].find((size) => size % tp !== 0);
		return cut === undefined ? null : `tp of ${name} is ${tp}; allowed is a divisor of its widths, such as ${cut}`;
	}),
	each(({ name, dataPath }, { datasetProvider: data }) => {
		if (data === "mock" || data === "tokens") return null;
		const given = dataPath === null ? "drawn input" : `data-path ${dataPath}`;
		return `${name} has ${given}, read by sample number; dataset-provider allowed beside it is mock or tokens, not ${data}`;
	}),
	(c) =>
		unless(
			c.modules.length === 0 || c.saveHf === null,
			"modules",
			"save-hf writes no further encoders; --save keeps them",
		),
	(c) =>
		unless(
			c.modules.length === 0 || c.savePeft === null,
			"modules",
			"save-peft writes no further encoders; --save keeps them",
		),
];
