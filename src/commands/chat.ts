/** `mimo chat`: a conversation with a trained model in the terminal. */
import { configuredCommand } from "./arguments.ts";
import { decodingOf, runJob } from "./generate.ts";

const help = `mimo chat --load FOLDER | --load-hf FOLDER [FLAGS]

A conversation with a trained model: a checkpoint of \`mimo train\` (--load), or a Hugging Face folder or its name on the Hub
(--load-hf). Every line is a turn, in the model's chat template; answers are shown as they arise.

  /image PATH          Shows the model a picture with the next turn, at its <image> tag or before it. May be given several times.
  /reset               Forgets all that was said, pictures too.
  /exit                Ends, as the end of the input (Ctrl-D) does. Ctrl-C stops an answer; at the prompt it ends the program.

  --system TEXT        System message of the conversation.
  --image FILE         A picture of the first turn; may be given several times.
  --max-new-tokens N   Most tokens of an answer. Default 256, or as many as the model has positions for.
  --temperature T      Divisor of the logits; 0 (default): greedy decoding.
  --top-k K            Sample from the K likeliest tokens.
  --top-p P            Sample from the likeliest tokens that together have the probability P.
  --bytes              The Hugging Face folder has no tokenizer because its model reads bytes.`;

const ownFlags = {
	system: true,
	"max-new-tokens": true,
	temperature: true,
	"top-k": true,
	"top-p": true,
	bytes: false,
};

export default configuredCommand({
	name: "chat",
	description: "Talk with a trained model, about pictures too.",
	help,
	ownFlags: { ...ownFlags, image: true },
	run: (args) =>
		runJob(args, ownFlags, (flags, images) => ({
			...{ kind: "conversation", images, showsPace: false },
			...{ system: flags.system ?? null, options: decodingOf(flags) },
		})),
});
