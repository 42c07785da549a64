/** `mimo evaluate` on a rank: opens the model, measures, reports. */
import { existsSync, writeFileSync } from "node:fs";
import type { TrainingConfiguration } from "../config/schema.ts";
import { Images } from "../native/images.ts";
import type { Library } from "../native/library.ts";
import { firstWarning, warn } from "../observe/messages.ts";
import { columns, print } from "../observe/output.ts";
import type { World } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { fileError } from "../system/system-errors.ts";
import { type Answered, answer, type Question, readQuestions } from "./answers.ts";
import { openModel } from "./checkpoint-model.ts";
import { reportingRank } from "./generate.ts";
import { type DatasetLoss, entriesOf, lossesOf } from "./losses.ts";
import { type Metric, metricNames } from "./metrics.ts";
import { RequestReader } from "./requests.ts";

export interface EvaluationJob {
	readonly data: readonly string[];
	/** JSONL files. */
	readonly questions: readonly string[];
	/** Samples of a data set at most. */
	readonly samples: number;
	readonly batchSize: number;
	readonly metrics: readonly Metric[];
	readonly maxNewTokens: number | null;
	/** New file for every question with its answer; null: none. */
	readonly output: string | null;
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
	/** Means over the questions that are answered by a text. */
	readonly metrics?: Readonly<Partial<Record<Metric, number>>>;
	readonly answers: readonly Answered[];
}

/** Throws a UserError for what can be known to be wrong before any rank starts. */
export function checkEvaluation(c: TrainingConfiguration, job: EvaluationJob, library: Library): void {
	entriesOf(c, job.data);
	if (job.output !== null && existsSync(job.output)) {
		throw new UserError(`--output ${job.output} exists already: name a new file.`);
	}
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
	const samples: string[] = [];
	if (job.questions.length > 0) {
		const reader = new RequestReader(c, new Images(world.device.library), job.bytes);
		for (const file of job.questions) {
			const asked = readQuestions(file, job.chat);
			const answers = answer(run, world, reader, asked, job);
			samples.push(...asked.map((question, index) => sampleLine(file, index, question, answers[index]!)));
			for (const kind of ["exact", "choice"] as const) {
				const own = answers.filter((one) => one.kind === kind);
				if (own.length === 0) continue;
				const mean = (metric: Metric) => own.reduce((sum, { scores }) => sum + scores![metric]!, 0) / own.length;
				const means = kind === "exact" && Object.fromEntries(job.metrics.map((metric) => [metric, mean(metric)]));
				const right = own.filter(({ right }) => right).length;
				questions.push({ file, kind, right, of: own.length, ...(means && { metrics: means }), answers: own });
			}
		}
	}
	if (run.rank !== reportingRank(run)) return;
	for (const sentence of skipped) warn(sentence);
	if (job.output !== null) writeSamples(job.output, samples);
	const bare = !job.chat && job.questions.some((file) => readQuestions(file, false).some(isBare));
	if (bare && c.conversationTemplate !== "plain") {
		warn("The model has a chat template, and prompts were read without it: --chat writes it around them.");
	}
	print(job.json ? JSON.stringify({ datasets, questions }, null, "\t") : tables(datasets, questions).join("\n"));
}

/** Whether a question is a text that goes on as it stands. */
const isBare = ({ request }: Question) => request.kind === "text";

/**
 * A line of a file of samples as lm-evaluation-harness and lmms-eval log them (--log_samples): the question's record, what is right,
 * the answer and its scores. Of choices `resps` are the mean losses, and `acc` says whether the right one was taken.
 */
function sampleLine(
	file: string,
	index: number,
	question: Question,
	{ text, right, scores, losses }: Answered,
): string {
	const isText = question.kind === "exact";
	const target = isText ? question.answers : question.choices[question.right]!;
	return JSON.stringify({
		...{ doc_id: index, file, doc: question.request.record },
		target: Array.isArray(target) && target.length === 1 ? target[0] : target,
		...{ resps: [isText ? [text] : losses!], filtered_resps: [text] },
		...(isText ? scores : { acc: Number(right) }),
	});
}

function writeSamples(path: string, lines: readonly string[]): void {
	try {
		writeFileSync(path, lines.map((line) => `${line}\n`).join(""), { flag: "wx" });
	} catch (error) {
		throw fileError("write", path, error);
	}
}

function tables(datasets: readonly DatasetLoss[], questions: readonly QuestionReport[]): string[] {
	const budgets = datasets[0]?.budgets.map(({ budget }) => `at budget ${budget}`) ?? [];
	const losses = datasets.map(({ dataset, part, samples, tokens, loss, budgets: each }) => [
		part === null ? dataset : `${dataset} (${part})`,
		String(samples),
		String(tokens),
		loss.toFixed(4),
		...each.map((one) => one.loss.toFixed(4)),
	]);
	const share = (value: number) => `${(100 * value).toFixed(1)} %`;
	const scores = questions.flatMap(({ file, right, of, metrics }) =>
		metrics === undefined
			? [[file, "multiple choice", `${right} of ${of}`, share(right / of)]]
			: (Object.entries(metrics) as [Metric, number][]).map(([metric, mean]) => {
					const count = metric === "anls" ? `of ${of}` : `${Math.round(mean * of)} of ${of}`;
					return [file, metricNames[metric], count, share(mean)];
				}),
	);
	return [
		...(losses.length > 0 ? columns([["data set", "samples", "tokens", "loss a token", ...budgets], ...losses]) : []),
		...(losses.length > 0 && scores.length > 0 ? [""] : []),
		...(scores.length > 0 ? columns([["questions", "measure", "right", "accuracy"], ...scores]) : []),
	];
}
