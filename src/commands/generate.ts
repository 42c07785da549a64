/** `mimo generate`: continues prompts with a trained model. */
import type { GenerateJob } from "../inference/run-generate.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { configurationOfArguments, configuredCommand, countFlag, numberFlag, takeRepeated } from "./arguments.ts";

const help = `mimo generate --load FOLDER | --load-hf FOLDER [--prompt TEXT | --chat | --input FILE.jsonl] [FLAGS]

Continues prompts with a trained model: a checkpoint of \`mimo train\` (--load), or a Hugging Face folder (--load-hf). The
model's keys, tokenizer and chat template come from there; flags win over them. A single answer is streamed. Tokens a second
of prefill and decode go to standard error.

  --prompt TEXT        Text to continue; with --chat, the user's turn.
  --chat               Apply the chat template to the prompt. Without --prompt: a conversation in one process, each line of
                       standard input a turn, as in \`mimo chat\`.
  --system TEXT        System message of the conversation.
  --image FILE         An image of the prompt, at its <image> tags or before it; may be given several times.
  --input FILE.jsonl   A record a line: prompt, or messages ([{role, content}]), and image or images (files).
  --output FILE.jsonl  New file for the answers, a line each in the order of the records. Default: standard output.
  --max-new-tokens N   Most tokens of an answer. Default 256, or as many as the model has positions for.
  --temperature T      Divisor of the logits; 0 (default): greedy decoding.
  --top-k K            Sample from the K likeliest tokens.
  --top-p P            Sample from the likeliest tokens that together have the probability P.
  --batch-size N       Records that a data lane decodes together. Default 8.
  --json               Print a JSON object a line for every answer: prompt, text, prompt_tokens, tokens, and end ("end token" or
                       "length"). Answers of --input are such lines without prompt and prompt_tokens unless --json is given.
  --bytes              The Hugging Face folder has no tokenizer because its model reads bytes.
  --nproc N            Ranks on this host; without it, as many as the configured grids need.

Random numbers follow --seed, the record's number and the token's, not batch or layout. Answers end at the
tokenizer's end token (data-end-id, <|im_end|> of chatml, or eos_token_id of the folder).`;

const ownFlags = {
	prompt: true,
	chat: false,
	system: true,
	input: true,
	output: true,
	"max-new-tokens": true,
	temperature: true,
	"top-k": true,
	"top-p": true,
	"batch-size": true,
	bytes: false,
	json: false,
	nproc: true,
};

type Flags = Readonly<Record<string, string>>;

export default configuredCommand({
	name: "generate",
	description: "Continue prompts with a trained model.",
	help,
	ownFlags: { ...ownFlags, image: true },
	run: (args) => runJob(args, ownFlags, jobOf),
});

type OwnFlags = Readonly<Record<string, boolean>>;

/** Runs the job that `jobOf` makes of the command's own flags and of its `--image`, on the ranks of the configuration. */
export async function runJob(
	args: readonly string[],
	ownFlags: OwnFlags,
	jobOf: (flags: Flags, images: readonly string[]) => GenerateJob,
): Promise<void> {
	const { checkpointEntries } = await import("../inference/checkpoint-model.ts");
	const { values: images, rest } = takeRepeated(args, "image");
	const resolved = configurationOfArguments(rest, ownFlags, { trains: false, beneath: checkpointEntries });
	const { configuration: c, command: flags } = resolved;
	const { checkJob, runGenerate } = await import("../inference/run-generate.ts");
	const { checkRankCount, onEveryRank, rankOptions, startsTheRun } = await import("./ranks.ts");
	const { topologyOf } = await import("../parallel/topology.ts");
	const topology = topologyOf(c);
	checkRankCount(topology, flags.nproc);
	const job = jobOf(flags, images);
	if (topology.worldSize > 1 && job.kind === "conversation") {
		throw new UserError("A conversation runs in one process alone: leave out the flags of grids.", exitCodes.usage);
	}
	if (startsTheRun()) {
		const { openLibraryOf } = await import("../native/open-device.ts");
		checkJob(c, job, await openLibraryOf(c.device));
	}
	const reporter = topology.language.lane(0, 0)[0]!;
	const options = { ...rankOptions(c, topology, reporter), quiet: true };
	await onEveryRank(options, (world) => runGenerate(c, job, world));
}

/** How answers are decoded. Throws a UserError for values that are out of range. */
export function decodingOf(flags: Flags): GenerateJob["options"] {
	const temperature = numberFlag(flags, "temperature", 0, "a number from 0", (value) => value >= 0);
	const topK = countFlag(flags, "top-k", null);
	const topP = numberFlag(flags, "top-p", 1, "a number above 0, at most 1", (value) => value > 0 && value <= 1);
	if (temperature === 0 && (flags["top-k"] !== undefined || flags["top-p"] !== undefined)) {
		throw new UserError(
			"--top-k and --top-p need --temperature above 0: without it decoding is greedy.",
			exitCodes.usage,
		);
	}
	return {
		maxNewTokens: countFlag(flags, "max-new-tokens", null),
		sampling: { temperature, topK, topP },
		batchSize: countFlag(flags, "batch-size", 8),
		bytes: "bytes" in flags,
		json: "json" in flags,
	};
}

/** The job that the command's own flags describe. Throws a UserError for values that are out of range. */
function jobOf(flags: Flags, images: readonly string[]): GenerateJob {
	const options = decodingOf(flags);
	const chat = "chat" in flags;
	const { prompt, input, output = null, system = null } = flags;
	if (system !== null && !chat && input === undefined) {
		throw new UserError("--system needs --chat or --input.", exitCodes.usage);
	}
	if (input !== undefined) {
		if (prompt !== undefined || images.length > 0) {
			throw new UserError(
				"--input contains prompts and images: --prompt and --image are not allowed with it.",
				exitCodes.usage,
			);
		}
		return { kind: "records", input, output, chat, system, options };
	}
	if (output !== null) throw new UserError("--output needs --input.", exitCodes.usage);
	if (prompt !== undefined) return { kind: "prompt", prompt, images, chat, system, options };
	if (chat) return { kind: "conversation", images, system, showsPace: true, options };
	throw new UserError("mimo generate needs --prompt TEXT, --chat or --input FILE.jsonl.", exitCodes.usage);
}
