/** `mimo trace`: commands for traces. */
import { defineCommand } from "citty";

export default defineCommand({
	meta: { name: "trace", description: "Sum up traces of training steps." },
	subCommands: { summary: () => import("./trace/summary.ts").then((module) => module.default) },
});
