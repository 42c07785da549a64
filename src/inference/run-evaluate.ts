/** `mimo evaluate` on a rank: opens the model, measures, reports. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { Images } from "../native/images.ts";
import type { Library } from "../native/library.ts";
import { firstWarning, warn } from "../observe/messages.ts";
import { columns, print } from "../observe/output.ts";
import type { World } from "../parallel/index.ts";
import { type Answered, answer, type Question, readQuestions } from "./answers.ts";
import { openModel } from "./checkpoint-model.ts";
import { reportingRank } from "./generate.ts";
import { type DatasetLoss, entriesOf, lossesOf } from "./losses.ts";
import { RequestReader } from "./requests.ts";

export interface EvaluationJob {
	readonly data: readonly string[];
	/** JSONL files. */
	readonly questions: readonly string[];
	/** Samples of a data set at most. */
	readonly samples: number;
	readonly batchSize: number;
	readonly chat: boolean;
	/** Whether a Hugging Face folder without a tokenizer holds a model of bytes. */
	readonly bytes: boolean;
	readonly json: boolean;
}

interface QuestionReport {
	readonly file: string;
	readonly kind: Question["kind"];
	readonly right: number;
	readonly of: number;
	readonly answers: readonly Answered[];
}

/** Throws a UserError for what can be known to be wrong before any rank starts. */
export function checkEvaluation(c: TrainingConfiguration, job: EvaluationJob, library: Library): void {
	entriesOf(c, job.data);
	if (job.questions.length === 0) return;
	const reader = new RequestReader(c, new Images(library), job.bytes, firstWarning());
	for (const file of job.questions) {
		for (const { request } of readQuestions(file, job.chat)) reader.requirePositions(reader.read(request), 1);
	}
}

/** Every rank of the world calls this together. */
export async function runEvaluate(c: TrainingConfiguration, job: EvaluationJob, world: World): Promise<void> {
	using run = await openModel(c, world, warn);
	const { losses: datasets, skipped } = await lossesOf(c, run, world, entriesOf(c, job.data), job.samples);
	const questions: QuestionReport[] = [];
	if (job.questions.length > 0) {
		const reader = new RequestReader(c, new Images(world.device.library), job.bytes);
		for (const file of job.questions) {
			const answers = answer(run, world, reader, readQuestions(file, job.chat), job.batchSize);
			for (const kind of ["exact", "choice"] as const) {
				const own = answers.filter((one) => one.kind === kind);
				if (own.length === 0) continue;
				questions.push({ file, kind, right: own.filter(({ right }) => right).length, of: own.length, answers: own });
			}
		}
	}
	if (run.rank !== reportingRank(run)) return;
	for (const sentence of skipped) warn(sentence);
	const bare = !job.chat && job.questions.some((file) => readQuestions(file, false).some(isBare));
	if (bare && c.conversationTemplate !== "plain") {
		warn("The model has a chat template, and prompts were read without it: --chat writes it around them.");
	}
	print(job.json ? JSON.stringify({ datasets, questions }, null, "\t") : tables(datasets, questions).join("\n"));
}

/** Whether a question is a text that goes on as it stands. */
const isBare = ({ request }: Question) => request.kind === "text";

const measures = { exact: "exact match", choice: "multiple choice" } as const;

function tables(datasets: readonly DatasetLoss[], questions: readonly QuestionReport[]): string[] {
	const budgets = datasets[0]?.budgets.map(({ budget }) => `at budget ${budget}`) ?? [];
	const losses = datasets.map(({ dataset, part, samples, tokens, loss, budgets: each }) => [
		part === null ? dataset : `${dataset} (${part})`,
		String(samples),
		String(tokens),
		loss.toFixed(4),
		...each.map((one) => one.loss.toFixed(4)),
	]);
	const scores = questions.map(({ file, kind, right, of }) => [
		file,
		measures[kind],
		`${right} of ${of}`,
		`${((100 * right) / of).toFixed(1)} %`,
	]);
	return [
		...(losses.length > 0 ? columns([["data set", "samples", "tokens", "loss a token", ...budgets], ...losses]) : []),
		...(losses.length > 0 && scores.length > 0 ? [""] : []),
		...(scores.length > 0 ? columns([["questions", "measure", "right", "accuracy"], ...scores]) : []),
	];
}
