/** The command table. Commands are imported when they run, so that `mimo --help` starts at once. */
import { runCommand } from "citty";
import { description } from "../package.json";
import type { AnyCommand, CommandTable } from "./commands/completion.ts";
import { print } from "./observe/output.ts";
import { requireDebugLevel } from "./system/debug.ts";
import { exitCodes } from "./system/exit-codes.ts";

const commands: CommandTable = {
	train: ["Train a model.", () => import("./commands/train.ts")],
	launch: ["Print what an engine needs to start a run.", () => import("./commands/launch.ts")],
	generate: ["Continue prompts with a trained model.", () => import("./commands/generate.ts")],
	chat: ["Talk with a trained model, about pictures too.", () => import("./commands/chat.ts")],
	evaluate: [
		"Measure a trained model's losses on data sets and its answers to questions.",
		() => import("./commands/evaluate.ts"),
	],
	plan: ["Estimate a run's memory, operations, traffic and step time.", () => import("./commands/plan.ts")],
	report: ["Draw a run's log as one HTML page.", () => import("./commands/report.ts")],
	trace: ["Summarise traces of training steps.", () => import("./commands/trace.ts")],
	bench: ["Step a known model and say how fast.", () => import("./commands/bench.ts")],
	parity: ["Compare training with reference runs.", () => import("./commands/parity.ts")],
	verify: ["Check that layouts of ranks compute what one process computes.", () => import("./commands/verify.ts")],
	"convert-ckpt": ["Convert a checkpoint between formats, or list one.", () => import("./commands/convert-ckpt.ts")],
	elastic: ["Rank, list and extract submodels of a trained parent.", () => import("./commands/elastic.ts")],
	data: ["Prepare, inspect and check Energon data sets.", () => import("./commands/data.ts")],
	diagnose: ["Explain why a run ended, from its ranks' recordings.", () => import("./commands/diagnose.ts")],
	doctor: ["Check what this machine offers and whether training can run.", () => import("./commands/doctor.ts")],
	completion: [
		"Print a script that completes commands and flags in a shell.",
		async () => ({ default: (await import("./commands/completion.ts")).completionCommand(commands) }),
	],
};

const help = `${description.replaceAll(/(?<=\.) /g, "\n")}

Usage: mimo COMMAND [FLAGS]

${Object.entries(commands)
	.map(([name, [summary]]) => `  ${name.padEnd(14)}${summary}`)
	.join("\n")}

  --help      Show this text, the help of a command (mimo COMMAND --help), or the flags about a word (mimo --help WORD).
  --version   Show version, commit, ABI version, native libraries; with --json as JSON.`;

async function main(args: readonly string[]): Promise<void> {
	requireDebugLevel();
	await run(args);
}

async function run(args: readonly string[]): Promise<void> {
	const [name, ...rest] = args;
	if (name === undefined || name === "--help" || name === "-h") return showHelp(rest);
	if (name === "help") return showHelp(rest);
	if (name === "--version" || name === "-v" || name === "version") {
		const { versionLine, versions } = await import("./commands/version.ts");
		print(rest.includes("--json") ? JSON.stringify(await versions()) : await versionLine());
		return;
	}
	if (!Object.hasOwn(commands, name)) await refuse(name, Object.keys(commands), "mimo");
	await runNamed((await commands[name]![1]()).default, rest, `mimo ${name}`);
}

/** Prints the command table; with words, the help of the command they name, or else the flags about them. */
async function showHelp(words: readonly string[]): Promise<void> {
	const [name, ...subcommand] = words;
	if (name === undefined) print(help);
	else if (Object.hasOwn(commands, name)) await run([name, ...subcommand, "--help"]);
	else {
		const { flagsAbout } = await import("./config/help.ts");
		print(flagsAbout(words));
	}
}

/** Runs a command, or the subcommand that the arguments name; `path` is the command as typed so far. */
async function runNamed(command: AnyCommand, args: readonly string[], path: string): Promise<void> {
	const [name, ...rest] = args;
	const below = command.subCommands as Readonly<Record<string, () => Promise<AnyCommand>>> | undefined;
	if (below !== undefined && name !== undefined && !["--help", "-h"].includes(name)) {
		if (!Object.hasOwn(below, name)) await refuse(name, Object.keys(below), path);
		await runNamed(await below[name]!(), rest, `${path} ${name}`);
		return;
	}
	if (command.args !== undefined || below !== undefined) {
		const { checkFlags, checkPositionals, usage } = await import("./commands/command.ts");
		if (below !== undefined || args.includes("--help") || args.includes("-h")) {
			print(await usage(command, path));
			return;
		}
		const known = command.args as Parameters<typeof checkFlags>[1];
		checkFlags(args, known);
		checkPositionals(args, known, path);
	}
	await runCommand(command, { rawArgs: [...args] });
}

async function refuse(name: string, names: readonly string[], path: string): Promise<never> {
	const { nearestHint } = await import("./config/names.ts");
	const { UserError } = await import("./system/errors.ts");
	const what = name.startsWith("-") ? "flag" : "command";
	const hint = nearestHint(name, what === "flag" ? ["--help", "--version"] : names);
	throw new UserError(`There is no ${what} ${name}${hint}. \`${path} --help\` lists all.`, exitCodes.usage);
}

/**
 * What a store has is brought to this host. A model that is named as on Hugging Face's Hub and is not here is downloaded, unless this process
 * is a rank of several.
 */
async function downloadAndRunAgain(error: unknown): Promise<void> {
	const { HubModelMissing, downloadModel } = await import("./checkpoint/hf/hub.ts");
	const { CopyMissing } = await import("./checkpoint/remote/copies.ts");
	if (error instanceof CopyMissing) {
		const { bringCopy } = await import("./checkpoint/remote/folder-copy.ts");
		await bringCopy(error.wanted);
		return await main(process.argv.slice(2)).catch(downloadAndRunAgain);
	}
	const { placeFromEnvironment } = await import("./launch/place.ts");
	if (!(error instanceof HubModelMissing) || placeFromEnvironment() !== null) throw error;
	const { ByteProgress } = await import("./commands/byte-progress.ts");
	let progress: InstanceType<typeof ByteProgress> | null = null;
	let seen = 0;
	await downloadModel(error.model, ({ total, done }) => {
		progress ??= new ByteProgress(`downloading ${error.model}`, total);
		progress.add(done - seen);
		seen = done;
	});
	await main(process.argv.slice(2)).catch(downloadAndRunAgain);
}

async function fail(error: unknown): Promise<never> {
	const { describeError, printStacks } = await import("./commands/command.ts");
	const { debugging } = await import("./system/debug.ts");
	const { sentence, exitCode } = describeError(error);
	const { withAddresses } = await import("./checkpoint/remote/copies.ts");
	const { complain } = await import("./observe/messages.ts");
	complain(withAddresses(sentence));
	if (debugging(1)) printStacks(error);
	process.exit(exitCode);
}

/**
 * Ends the program after a failed write: silently if the reader has exited (EPIPE), as `head` does; else with the error. A rank that
 * outlives its launcher, through which it writes, goes on to its save.
 */
async function outputFailed(name: string, error: NodeJS.ErrnoException): Promise<void> {
	if (error.code === "EPIPE") {
		const { launcherHasEnded } = await import("./launch/place.ts");
		if (await launcherHasEnded()) return;
		process.exit(exitCodes.unread);
	}
	const { fileError } = await import("./system/system-errors.ts");
	await fail(fileError("write", name, error));
}

process.stdout.on("error", (error) => void outputFailed("standard output", error));
process.stderr.on("error", (error) => void outputFailed("standard error", error));
process.on("uncaughtException", fail);
process.on("unhandledRejection", fail);
await main(process.argv.slice(2)).catch(downloadAndRunAgain).catch(fail);
