/** Messages outside a run's log: their form on a terminal and elsewhere. */
import { expect, test } from "bun:test";
import { join } from "node:path";

const module = join(import.meta.dir, "../../src/observe/messages.ts");
const script = `
import { complain, note, remark, warn } from ${JSON.stringify(module)};
note("A note."); remark("A remark."); warn("Something is lost."); complain("It ends.");`;

function environment(extra: Record<string, string>): Record<string, string | undefined> {
	const { NO_COLOR: _, ...rest } = process.env;
	return { ...rest, ...extra };
}

async function onTerminal(extra: Record<string, string> = {}): Promise<string[]> {
	const written: Uint8Array[] = [];
	const child = Bun.spawn([process.execPath, "-e", script], {
		env: environment({ TERM: "xterm-256color", ...extra }),
		terminal: { cols: 80, rows: 24, data: (_, bytes) => written.push(bytes.slice()) },
	});
	await child.exited;
	child.terminal!.close();
	// What clears a view below is tested with the view.
	return Buffer.concat(written).toString().replaceAll("\u001b[J", "").trim().split("\r\n");
}

test("on a terminal a warning alone is marked, in colour, and no message has a clock", async () => {
	expect(await onTerminal()).toEqual([
		"A note.",
		"A remark.",
		"\u001b[33mWarning: \u001b[39mSomething is lost.",
		"\u001b[31mmimo: \u001b[39mIt ends.",
	]);
	expect((await onTerminal({ NO_COLOR: "1" })).slice(2)).toEqual(["Warning: Something is lost.", "mimo: It ends."]);
});

test("in a pipe every message is its sentence, and notes alone are output", () => {
	const { stdout, stderr } = Bun.spawnSync([process.execPath, "-e", script], { env: environment({}) });
	expect(stdout.toString()).toBe("A note.\n");
	expect(stderr.toString()).toBe("A remark.\nSomething is lost.\nmimo: It ends.\n");
});
