"""Text that the tiny tokenizer learns its merges from, and the chat template that goes with it."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, as Qwen's and SmolLM's models use it."""

TEXT = """\
The kitchen of a small restaurant is a good place to learn about scheduling. Orders arrive when guests please, one by
one on a quiet evening, in crowds when the theatre closes. Some are small, a soup and a piece of bread; others are
large, and nobody knows how long they will take before the last plate has gone out. The cook has one stove. Whatever
stands on it gets hot together, and a full stove takes hardly longer than a half empty one, so it pays to cook many
orders at once. But every pot needs its place, and the places are few.

How should the cook choose? First come, first served is fair and easy to explain, yet a single feast in front of the
queue keeps ten soups waiting. The shortest order first makes the average guest happy, and the one who wanted the feast
goes home hungry. One may cut the feast into courses and let the soups pass between them: the guests with the soups
wait a little longer for each spoon, and the feast is on its way. One may also promise every table that its next
spoon comes within a minute, and take new orders only while that promise can be kept. What is best depends on what the
guests value, on how often they come, and on the stove.

A language model is served in much the same way. A request comes with a prompt, a few words or many thousand. The
prompt is read in one go, which keeps the arithmetic units of the device busy; afterwards the answer is written token
by token, and each token needs all the weights of the model to be read from memory once more. Reading them for one
request or for sixty costs nearly the same, hence requests are put together in batches. For each token that it has read
or written a request holds a key and a value in memory, in every layer, and when the memory is full somebody has to
give way: the request is stopped, its memory is given to others, and later it is computed again or copied back from
where it was put aside. A good schedule keeps the device busy and the people patient, and it does so without knowing
when the next request will arrive, or how long the answer to the present one is going to be.

There are many rules of this kind, and new ones are proposed every month. Which of them helps, where, and by how much?
To find out, one would like to write a rule down once, try it on a simulated device with the traffic of a whole day,
look at the tail of the waiting times, change a number, and try again; and in the end run the very same rule on a real
device and see the same decisions, step by step. If the two agree, the simulation can be trusted for the next question.
If they do not agree, the first step at which they differ shows what the simulation has not understood. That is what a
playground is for: to be wrong quickly, cheaply, and in the open, until one is right.

Numbers from 0 to 9, and 10, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096: powers of two are everywhere. Names such as
Paris, London, Berlin, Tokyo, Madrid and Rome are short; words like preemption, throughput, percentile, asynchronous
and speculative are long. Question: what is the capital of France? Answer: Paris. Question: is it faster? Answer: yes,
but only under load. Thank you for reading so far; the rest of the vocabulary is made of single bytes.
"""
