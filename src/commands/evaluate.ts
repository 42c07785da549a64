/** `mimo evaluate`: measures a trained model's losses on data sets and its answers to questions. */
import { configurationJson, configurationTable } from "../config/print.ts";
import { type Metric, metrics } from "../inference/metrics.ts";
import { print } from "../observe/output.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { configurationOfArguments, configuredCommand, countFlag, flagError, takeRepeated } from "./arguments.ts";

const help = `mimo evaluate --load FOLDER | --load-hf FOLDER [--data PATH]... [--questions FILE.jsonl]... [FLAGS]

The mean token loss of a trained model on data sets, and the share of questions that it answers correctly. The model is
named as for \`mimo generate\`. An elastic parent is measured at every budget too, with sizes that the router chooses without
noise; --is-flex-eval --override-selected-budget B measures at that budget alone.

  --data PATH          Text, .safetensors with tokens, or Energon data, whose part valid-data-split-part is read; each entry
                       of a metadataset is measured by itself. May be given several times.
  --samples N          Most samples of a data set. Default 1000.
  --questions FILE     JSONL: prompt or messages, image or images, and answer (or answers), to which the model's greedy answer
                       is compared. With choices (multiple choice), answer is a choice's text, number from 0 or letter, and
                       the model takes the choice with the lowest mean token loss after the prompt. May be given several times.
  --metric NAME        How a text is compared: exact_match (default), equal but for surrounding space; accuracy, equal but for
                       case, punctuation and articles; anls, normalized Levenshtein similarity, 0 below a half. May be given
                       several times.
  --max-new-tokens N   Most tokens of a text. Default: of the longest right answer and an end where exact_match is the only
                       metric, else 64.
  --output FILE.jsonl  New file with a line for every question: record, right and given answer, scores, as lmms-eval logs samples.
  --chat               Apply the chat template to a question's prompt, as the user's turn.
  --batch-size N       Sequences that a data lane takes together. Default 8.
  --bytes              The Hugging Face folder has no tokenizer because its model reads bytes.
  --json               Print everything as JSON, answers included.
  --print-config       Show every value and where it came from, and stop. With --json as JSON.
  --nproc N            Ranks on this host; without it, as many as the configured grids need.`;

const ownFlags = {
	samples: true,
	"max-new-tokens": true,
	output: true,
	chat: false,
	"batch-size": true,
	bytes: false,
	json: false,
	"print-config": false,
	nproc: true,
};

export default configuredCommand({
	name: "evaluate",
	description: "Measure a trained model's losses on data sets and its answers to questions.",
	help,
	ownFlags: { ...ownFlags, data: true, questions: true, metric: true },
	run: async (args) => {
		const { checkpointEntries } = await import("../inference/checkpoint-model.ts");
		const data = takeRepeated(args, "data");
		const questions = takeRepeated(data.rest, "questions");
		const named = takeRepeated(questions.rest, "metric");
		const resolved = configurationOfArguments(named.rest, ownFlags, { trains: false, beneath: checkpointEntries });
		const { configuration: c, command: flags } = resolved;
		if ("print-config" in flags) {
			print("json" in flags ? configurationJson(resolved) : configurationTable(resolved));
			return;
		}
		if (data.values.length + questions.values.length === 0) {
			throw new UserError("mimo evaluate needs --data PATH or --questions FILE.jsonl.", exitCodes.usage);
		}
		const chosen = metricsOf(named.values);
		if (flags.output !== undefined && questions.values.length === 0) {
			throw new UserError("--output needs --questions.", exitCodes.usage);
		}
		const job = {
			metrics: chosen,
			maxNewTokens: countFlag(flags, "max-new-tokens", chosen.some((metric) => metric !== "exact_match") ? 64 : null),
			output: flags.output ?? null,
			data: data.values,
			questions: questions.values,
			samples: countFlag(flags, "samples", 1000),
			batchSize: countFlag(flags, "batch-size", 8),
			chat: "chat" in flags,
			bytes: "bytes" in flags,
			json: "json" in flags,
		};
		const { checkEvaluation, runEvaluate } = await import("../inference/run-evaluate.ts");
		const { checkRankCount, onEveryRank, rankOptions, startsTheRun } = await import("./ranks.ts");
		const { topologyOf } = await import("../parallel/topology.ts");
		const topology = topologyOf(c);
		checkRankCount(topology, flags.nproc);
		if (startsTheRun()) {
			const { openLibraryOf } = await import("../native/open-device.ts");
			checkEvaluation(c, job, await openLibraryOf(c.device));
		}
		const reporter = topology.language.lane(0, 0)[0]!;
		const options = { ...rankOptions(c, topology, reporter), quiet: true };
		await onEveryRank(options, (world) => runEvaluate(c, job, world));
	},
});

/** The metrics of these names, exact_match without any. Throws a UserError for another name. */
function metricsOf(names: readonly string[]): readonly Metric[] {
	const unknown = names.find((name) => !metrics.some((metric) => metric === name));
	if (unknown !== undefined) throw flagError("metric", unknown, metrics.join(", "));
	return names.length === 0 ? ["exact_match"] : metrics.filter((metric) => names.includes(metric));
}
