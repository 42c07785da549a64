/** `mimo data …`: commands for data sets, one file each, imported when they run. */
import { defineCommand } from "citty";

export default defineCommand({
	meta: { name: "data", description: "Prepare, inspect and check data sets." },
	subCommands: {
		prepare: () => import("./data/prepare.ts").then((module) => module.default),
		"prepare-text": () => import("./data/prepare-text.ts").then((module) => module.default),
		import: () => import("./data/import.ts").then((module) => module.default),
		info: () => import("./data/info.ts").then((module) => module.default),
		lint: () => import("./data/lint.ts").then((module) => module.default),
		preview: () => import("./data/preview.ts").then((module) => module.default),
		bench: () => import("./data/bench.ts").then((module) => module.default),
	},
});
