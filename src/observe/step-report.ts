/** The reports of the training loop, and the Observer interface that receives them. */

/** Seconds of a step by part; the parts add up to the step. */
export interface StepSeconds {
	/** Forward and backward passes, with collectives in layers. */
	readonly compute: number;
	/** Waiting at an edge for rows or gradients of another module or pipeline stage; logs call it bridge, as Megatron does. */
	readonly bridge: number;
	/** Waiting for the passes of all ranks. */
	readonly wait: number;
	/** Reducing gradients, gathering parameters. */
	readonly gradients: number;
	/** Zeroing gradients, norm, clipping, update. */
	readonly optimizer: number;
	/** Waiting for samples. */
	readonly data: number;
	/** All other work of the loop. */
	readonly other: number;
}

/** A module's step, as means over its ranks. */
export interface ModuleReport {
	/** "radio_encoder" or "language". */
	readonly name: string;
	readonly ranks: number;
	readonly seconds: StepSeconds;
	/** Floating-point operations of the whole module, forward and backward; 0 where they are not counted. */
	readonly flops: number;
	/** Share of the step in which the ranks wait for the other module or for each other. */
	readonly idle: number;
	/** The slowest rank, and its seconds without waiting. */
	readonly slowest: { readonly rank: number; readonly busy: number };
}

/** Bytes of device memory of a rank. */
export interface RankMemory {
	readonly allocated: number;
	readonly reserved: number;
	readonly peak: number;
}

/** Values by layer, from 0. */
export type ByLayer<Value> = ReadonlyMap<number, Value>;

/** A step's participation, as logged. */
export interface ParticipationResult {
	/** Encoder ranks (data-parallel) with an image in any microbatch of the step, and the number of all of them. */
	readonly participants: number;
	readonly ranks: number;
	/** Global gradient norm under the exact and under the corrected policy. */
	readonly exactNorm: number;
	readonly correctedNorm: number;
}

export interface StepReport {
	/** Number of the step, from 1. */
	readonly iteration: number;
	/** Number of samples consumed, with this step's. */
	readonly consumedSamples: number;
	/** Number of skipped samples so far. */
	readonly skippedSamples: number;
	readonly globalBatchSize: number;
	/** Number of tokens of the step. */
	readonly tokens: number;
	/** Share of padding in the tokens; absent if sequences are not padded. */
	readonly padding?: number;
	/** Wall-clock time of the step, without saving and evaluation. */
	readonly seconds: number;
	/** Learning rate of this step. */
	readonly learningRate: number;
	/** Learning rate of the next step, which Megatron prints. */
	readonly nextLearningRate: number;
	/** Mean losses of the step by Megatron's name, "lm loss" first. */
	readonly losses: Readonly<Record<string, number>>;
	readonly lossScale: number;
	/** Global gradient norm before clipping; null if the step was skipped. */
	readonly gradNorm: number | null;
	/** Number of zero gradients; null if not counted. */
	readonly numZeros: number | null;
	/** Norm of all parameters; null if not computed. */
	readonly paramsNorm: number | null;
	/** Whether the update was skipped. */
	readonly skipped: boolean;
	/** Number of encoder ranks with images, and the gradient norm under either policy; null without an encoder. */
	readonly participation: ParticipationResult | null;
	/** Absent if not measured. */
	readonly modules?: readonly ModuleReport[];
	/** Device memory by rank. */
	readonly memory?: readonly RankMemory[];
	/** Balancing losses by Megatron's name and layer. */
	readonly layerLosses?: Readonly<Record<string, ByLayer<number>>>;
	/** Number of tokens of each expert in this step, over all ranks. */
	readonly tokensPerExpert?: ByLayer<readonly number[]>;
}

export interface EvaluationReport {
	readonly iteration: number;
	/** Number of training samples so far. */
	readonly consumedSamples?: number;
	/** "validation" or "test". */
	readonly split: "validation" | "test";
	/** Megatron's label of the evaluation: "iteration 100", "iteration 300 on test set". */
	readonly label: string;
	/** Mean losses of the evaluation, by name. */
	readonly losses: Readonly<Record<string, number>>;
}

/** Display of timers over ranks: minimum and maximum, maximum, or all ranks. */
export type TimingOption = "minmax" | "max" | "all";

/** Megatron's timers since the last log line. */
export interface TimersReport {
	readonly iteration: number;
	readonly option: TimingOption;
	/** Mean seconds of a step, by timer and rank; 0 if the rank has not used the timer. */
	readonly seconds: ReadonlyMap<string, readonly number[]>;
}

/** The start or resumption of a training in this process. */
export interface TrainingStart {
	/** Steps done by then. */
	readonly step: number;
	/** Identifier of the training, 64 hexadecimal digits, by which a run that resumes from its checkpoints finds its records. */
	readonly training: string;
	/** All configuration keys with values. */
	readonly configuration: Readonly<Record<string, unknown>>;
	/** Arguments of the training's command line, without secrets. */
	readonly arguments: readonly string[];
}

/** An event between steps, for the log from which a report is made. */
export interface RunEvent {
	readonly kind: "start" | "save" | "stop" | "data" | "budgets" | "samples" | "failure" | "slow" | "end";
	/** Number of steps done before; null: of the latest report. */
	readonly step: number | null;
	readonly sentence: string;
	/** Further fields of the log, such as configuration and topology of a start. */
	readonly details?: Readonly<Record<string, unknown>>;
}

/** A sink that shows or stores a training. Calls come in the order of events. */
export interface Observer {
	/** Called before the first step. */
	begin?(start: TrainingStart): void;
	step(report: StepReport): void;
	evaluation(report: EvaluationReport): void;
	/** Called with a sentence for the user. */
	note(sentence: string): void;
	/** Called after a step's report, if timers are configured. */
	timers?(report: TimersReport): void;
	/** Called for each event. */
	event?(event: RunEvent): void;
	close(): void;
}

/** An observer that forwards all calls to others, in order. */
export function together(observers: readonly Observer[]): Observer {
	return {
		begin: (start) => {
			for (const observer of observers) observer.begin?.(start);
		},
		step: (report) => {
			for (const observer of observers) observer.step(report);
		},
		evaluation: (report) => {
			for (const observer of observers) observer.evaluation(report);
		},
		note: (sentence) => {
			for (const observer of observers) observer.note(sentence);
		},
		timers: (report) => {
			for (const observer of observers) observer.timers?.(report);
		},
		event: (event) => {
			for (const observer of observers) observer.event?.(event);
		},
		close: () => {
			for (const observer of observers) observer.close();
		},
	};
}
