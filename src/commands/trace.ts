/** `mimo trace …`: commands for traces, imported when they run. */
import { defineCommand } from "citty";

export default defineCommand({
	meta: { name: "trace", description: "Summarise traces of training steps." },
	subCommands: { summary: () => import("./trace/summary.ts").then((module) => module.default) },
});
