/** `mimo parity` on processes: references with images of one size. */
import { agreesOnProcesses, staged } from "./agreement.ts";

agreesOnProcesses("mimo-1x1-fixed", [null, "1", "1+1", "tp2+tp2ep2", "tp2+1", ...staged]);
agreesOnProcesses("mimo-dp2-dp2ep2-fixed", [
	...[null, "1", "1+1", "dp2+dp2ep2", "tp2dp2+tp2dp2ep2", "1+dp2ep2", "4+4", "tp4+tp2"],
	...staged,
]);
