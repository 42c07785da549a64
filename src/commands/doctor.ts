/** `mimo doctor`: what this machine offers, one line each; exits 1 when training could not run on it. */
import { defineCommand } from "citty";
import { exitCodes } from "./command.ts";
import { type Finding, inspectMachine } from "./machine.ts";

const marks = { good: "ok", information: "", warning: "!", problem: "x" } as const;

function line({ name, value, state, advice }: Finding): string {
	return `${marks[state].padEnd(3)}${name.padEnd(16)}${value}${advice === undefined ? "" : `: ${advice}`}`;
}

export default defineCommand({
	meta: { name: "doctor", description: "What this machine offers, and whether training can run." },
	args: { json: { type: "boolean", description: "Print one JSON object instead of lines." } },
	run: async ({ args }) => {
		const findings = await inspectMachine();
		const ready = findings.every(({ state }) => state !== "problem");
		if (args.json) console.log(JSON.stringify({ ready, findings }, null, 2));
		else {
			for (const finding of findings) console.log(line(finding));
			console.log(ready ? "\nTraining can run here." : "\nTraining cannot run here; see x.");
		}
		if (!ready) process.exitCode = exitCodes.failure;
	},
});
