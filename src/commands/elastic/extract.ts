/** `mimo elastic extract`: writes a submodel of a checkpoint as a checkpoint of its own. */
import { defineCommand } from "citty";
import {
	canonicalLayout,
	formatBytes,
	formats,
	placedFolder,
	requireEmpty,
	requireFormat,
	type SourceCheckpoint,
	withAddresses,
} from "../../checkpoint/index.ts";
import { readChoice } from "../../guests/elastic/submodel/choice.ts";
import { type Extraction, planExtraction } from "../../guests/elastic/submodel/extract.ts";
import { routerOf, submodelOfBudget } from "../../guests/elastic/submodel/family.ts";
import type { Submodel } from "../../guests/elastic/submodel/submodel.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { parametersOf } from "../../models/language/counts.ts";
import { describedConfig } from "../../models/language/from-configuration.ts";
import { remark, warn } from "../../observe/messages.ts";
import { print } from "../../observe/output.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { programVersion } from "../../system/program-version.ts";
import { type Arguments, bytesOf, choice, dtypeOf, flagError, text } from "../arguments.ts";
import { ByteProgress } from "../byte-progress.ts";

const args = {
	load: {
		type: "string",
		valueHint: "CHECKPOINT",
		description: "The parent: a native, Hugging Face or torch_dist checkpoint.",
	},
	choice: { type: "string", valueHint: "FILE", description: "The submodel's sizes, in YAML or JSON." },
	budget: {
		type: "string",
		valueHint: "B",
		description: "Instead of --choice: the sizes that the checkpoint's router chooses for this budget.",
	},
	save: { type: "string", valueHint: "FOLDER", description: "Folder to write the submodel to, new or empty." },
	to: { type: "string", description: `Format to write: ${formats.join(", ")}; unset: the parent's.` },
	dtype: { type: "string", description: "Float type of the written weights (F32, BF16, F16); unset: as stored." },
	"max-shard-size": { type: "string", default: "5GB", description: "Largest file of the target, such as 500MB." },
	force: { type: "boolean", description: "Replace a target that is not empty." },
	sync: { type: "boolean", description: "Wait until the files are on the disk." },
	"allow-fallback": { type: "boolean", description: "Read an older checkpoint when the newest is damaged." },
} as const;

export default defineCommand({
	meta: { name: "extract", description: "Write a submodel of a checkpoint as a checkpoint of its own." },
	args,
	run: async ({ args: given }) => {
		const parsed = given as unknown as Arguments;
		const load = placedFolder(needed(parsed, "load"));
		const choose = chooser(parsed);
		const save = needed(parsed, "save");
		const from = requireFormat(load, null);
		if (parsed.force !== true) await requireEmpty(save);
		using planned = planExtraction(
			{
				...{ from, to: choice(parsed, "to", formats) ?? from, source: load, target: save },
				...{ optimizer: false, adapters: null, drop: [], pattern: null, inert: [], visionHeads: null },
				...{ names: null, reference: null, layerNames: null, wrapper: null, paddedVocabularySize: null },
				allowFallback: parsed["allow-fallback"] === true,
				newLayers: { seed: 0, sizes: {} },
				force: parsed.force === true,
				staging: null,
				sync: parsed.sync === true,
				dtype: dtypeOf(parsed),
				layout: canonicalLayout,
				shardBytes: bytesOf(text(parsed, "max-shard-size") ?? "5GB"),
				generator: `mimo ${programVersion()}`,
			},
			choose,
		);
		for (const sentence of planned.notices) remark(sentence);
		for (const sentence of planned.warnings) warn(sentence);
		if (planned.dropsOptimizer)
			warn(`The optimizer state of ${withAddresses(load)} is the parent's: the submodel gets none.`);
		const progress = new ByteProgress("writing", planned.bytes);
		const written = await planned.run((bytes) => progress.add(bytes));
		progress.done();
		print(
			`${written}: ${counted(planned.tensors.tensors.size, "tensor")}, ${formatBytes(planned.bytes)}; ${summary(planned)}.`,
		);
	},
});

/** Returns the function that chooses the submodel by --choice or --budget. */
function chooser(given: Arguments): (parent: HybridConfig, source: SourceCheckpoint) => Submodel {
	const [file, budget] = [text(given, "choice"), text(given, "budget")];
	if ((file === null) === (budget === null)) {
		throw new UserError("mimo elastic extract needs either --choice FILE or --budget B.", exitCodes.usage);
	}
	if (file !== null) return (parent) => readChoice(file, parent);
	const value = Number(budget);
	if (!(value > 0 && Number.isFinite(value))) {
		throw flagError("budget", budget!, "a number greater than 0");
	}
	return (parent, source) => submodelOfBudget(routerOf(source, parent), parent, value);
}

function needed(given: Arguments, name: string): string {
	const value = text(given, name);
	if (value !== null) return value;
	throw new UserError(`--${name} is missing; \`mimo elastic extract --help\` lists the flags.`, exitCodes.usage);
}

/** "hidden-size 48 of 64, 5 of 6 layers, 0.18 M of 0.47 M parameters". */
function summary({ parent, child }: Extraction): string {
	const millions = (model: Extraction["parent"]) =>
		(parametersOf(describedConfig(model, { bf16: false })).total / 1e6).toFixed(2);
	return (
		`hidden-size ${child.hiddenSize} of ${parent.hiddenSize}, ${child.numLayers} of ${counted(parent.numLayers, "layer")}, ` +
		`${millions(child)} M of ${millions(parent)} M parameters`
	);
}
