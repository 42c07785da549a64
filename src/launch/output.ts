/** Output of a child process, forwarded whole line by whole line. */

/** Writes each line of `from` to `to` behind `prefix`; resolves at its end. */
export async function forwardLines(
	from: ReadableStream<Uint8Array>,
	to: { write(text: string): unknown },
	prefix: string,
): Promise<void> {
	const decoder = new TextDecoder();
	let rest = "";
	for await (const bytes of from) {
		const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
		rest = lines.pop()!;
		for (const line of lines) to.write(`${prefix}${line}\n`);
	}
	rest += decoder.decode();
	if (rest !== "") to.write(`${prefix}${rest}\n`);
}
