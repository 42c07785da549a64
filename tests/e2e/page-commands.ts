/** The fenced blocks of a page of the documentation, and what their commands print. */

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
