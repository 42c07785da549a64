/** The fenced blocks of a page of the documentation, and what their commands print. */
import { cpSync } from "node:fs";
import { dirname, join } from "node:path";
import { executable } from "../commands/mimo.ts";

export interface Block {
	/** "sh" is run; "text" is what the block before it prints, in part. */
	readonly language: string;
	readonly text: string;
}

/** Blocks in the order of the page. */
export function blocksOf(page: string): Block[] {
	return [...page.matchAll(/^```(\w*)\n([\s\S]*?)^```$/gm)].map(([, language, text]) => ({
		language: language!,
		text: text!,
	}));
}

/** The commands of a block: lines, joined where one ends with a backslash; without those that are comments alone. */
export function commandsOf({ text }: Block): string[] {
	return text
		.replaceAll(/\\\n\s*/g, "")
		.split("\n")
		.filter((line) => line.trim() !== "" && !line.startsWith("#"));
}

/** A line without what differs from run to run: numbers, and how wide columns are. */
const shapeOf = (line: string): string =>
	line
		.trim()
		.replaceAll(/\d+(?:\.\d+)?(?:e[+-]?\d+)?/gi, "#")
		.replaceAll(/\s+/g, " ");

/** Lines of a block of output that the commands have not printed, but for their numbers; "..." stands for anything. */
export function missingLines({ text }: Block, printed: string): string[] {
	const shapes = printed.split("\n").map(shapeOf);
	const isPrinted = (line: string) => {
		const parts = shapeOf(line).split("...");
		return shapes.some((shape) => {
			const places = parts.map((part) => shape.indexOf(part));
			return parts.length === 1 ? shape === parts[0] : places.every((place) => place >= 0);
		});
	};
	return text.split("\n").filter((line) => line.trim() !== "" && !isPrinted(line));
}

/** A command of a page that was run. */
export interface Ran {
	readonly command: string;
	readonly exitCode: number;
	/** Both streams. */
	readonly printed: string;
}

/**
 * Runs the commands of a page in `folder`, which gets the examples, one after another up to the first that fails. Trainings get
 * `trainingFlags` too.
 */
export function runPage(page: string, folder: string, trainingFlags = ""): Ran[] {
	const ran: Ran[] = [];
	cpSync(join(import.meta.dir, "../../examples"), join(folder, "examples"), { recursive: true });
	const env = { ...process.env, PATH: `${dirname(executable)}:${process.env.PATH}`, MIMO_DEBUG: "0" };
	const options = { cwd: folder, env, stdin: "ignore", stdout: "pipe", stderr: "pipe" } as const;
	for (const command of pageCommands(page)) {
		const { exitCode, stdout, stderr } = Bun.spawnSync(
			["bash", "-ec", command.startsWith("mimo train ") ? `${command} ${trainingFlags}` : command],
			options,
		);
		ran.push({ command, exitCode, printed: `${stdout}${stderr}` });
		if (exitCode !== 0) break;
	}
	return ran;
}

/** The commands of a page in their order. */
export function pageCommands(page: string): string[] {
	return blocksOf(page).flatMap((block) => (block.language === "sh" ? commandsOf(block) : []));
}
