/** `mimo launch …`: manifests of a run for engines, one file each, imported when they run. */
import { defineCommand } from "citty";

export default defineCommand({
	meta: { name: "launch", description: "Print what an engine needs to start a run." },
	subCommands: {
		kubernetes: () => import("./launch/kubernetes.ts").then((module) => module.default),
	},
});
