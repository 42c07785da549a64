/** Forwards the output of a child process line by line. */
import { beforeLine, type TerminalStream } from "../observe/progress.ts";

/** Writes each line of `from` to `to` with `prefix`; resolves at the end of `from`. */
export async function forwardLines(
	from: ReadableStream<Uint8Array>,
	to: TerminalStream,
	prefix: string,
): Promise<void> {
	const decoder = new TextDecoder();
	let rest = "";
	for await (const bytes of from) {
		const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
		rest = lines.pop()!;
		for (const line of lines) to.write(`${beforeLine(to)}${prefix}${line}\n`);
	}
	rest += decoder.decode();
	if (rest !== "") to.write(`${beforeLine(to)}${prefix}${rest}\n`);
}
