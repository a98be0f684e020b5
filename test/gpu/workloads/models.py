"""A model with random weights, fp16, in a closed loop.
usage: models.py [--model resnet|bert|decoder] [--batch N] [--ahead N] [--graph] [--events] [--seconds S] [--start-at EPOCH] [--ramp-ms 400] [--stdin]
  resnet    ResNet-50, batch 64, four batches under way: with one, the GPU would be idle for a moment after each, and a
            neighbour's turn come with it. Counts images.
  bert      BERT-Large, batch 8 of 128 tokens, one after the other. Counts sequences.
  decoder   a Llama of 1.1 billion parameters, batch 4, a token for each after the other with a cache of 128. Counts tokens.
--graph launches a step as one CUDA graph, as servers decode: the GPU does not wait between its kernels. --events has the time of all
steps by CUDA's events in the last line."""
import torch

import closedloop


def resnet(batch):
    import torchvision
    net = torchvision.models.resnet50().half().to(memory_format=torch.channels_last).cuda().eval()
    images = torch.randn(batch, 3, 224, 224, dtype=torch.half, device="cuda").to(memory_format=torch.channels_last)
    return lambda: net(images)


def bert(batch):
    from transformers import BertConfig, BertModel
    with torch.device("cuda"):
        net = BertModel(BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)).half().eval()
        words = torch.randint(0, 30000, (batch, 128))
    return lambda: net(words)


class Layer(torch.nn.Module):
    """One of a Llama's, for the token at TOKENS - 1 of a cache that is full."""
    WIDTH, HEADS, GROUPS, HEAD, INNER, TOKENS = 2048, 32, 4, 64, 5632, 128

    def __init__(self, batch):
        super().__init__()
        linear = lambda a, b: torch.nn.Linear(a, b, bias=False)
        self.before, self.between = torch.nn.RMSNorm(self.WIDTH), torch.nn.RMSNorm(self.WIDTH)
        self.query, self.out = linear(self.WIDTH, self.WIDTH), linear(self.WIDTH, self.WIDTH)
        self.key, self.value = linear(self.WIDTH, self.GROUPS * self.HEAD), linear(self.WIDTH, self.GROUPS * self.HEAD)
        self.gate, self.up, self.down = linear(self.WIDTH, self.INNER), linear(self.WIDTH, self.INNER), linear(self.INNER, self.WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, self.GROUPS, self.TOKENS, self.HEAD))

    @staticmethod
    def rotated(x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x, cos, sin):
        h, batch = self.before(x), x.shape[0]
        query = self.rotated(self.query(h).view(batch, 1, self.HEADS, self.HEAD).transpose(1, 2), cos, sin)
        self.keys[:, :, -1:] = self.rotated(self.key(h).view(batch, 1, self.GROUPS, self.HEAD).transpose(1, 2), cos, sin)
        self.values[:, :, -1:] = self.value(h).view(batch, 1, self.GROUPS, self.HEAD).transpose(1, 2)
        seen = torch.nn.functional.scaled_dot_product_attention(query, self.keys, self.values, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, 1, self.WIDTH))
        h = self.between(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def decoder(batch):
    words = 32000
    torch.set_default_dtype(torch.half)
    with torch.device("cuda"):
        embedding, layers = torch.nn.Embedding(words, Layer.WIDTH), [Layer(batch) for _ in range(22)]
        norm, head = torch.nn.RMSNorm(Layer.WIDTH), torch.nn.Linear(Layer.WIDTH, words, bias=False)
        angle = torch.outer(torch.tensor([Layer.TOKENS - 1.0]), 10000.0 ** (-torch.arange(0, Layer.HEAD, 2) / Layer.HEAD)).repeat(1, 2)
        cos, sin, word = angle.cos(), angle.sin(), torch.zeros(batch, 1, dtype=torch.long)

    def token():
        x = embedding(word)
        for layer in layers:
            x = layer(x, cos, sin)
        word.copy_(head(norm(x)).argmax(-1))

    return token


def graphed(work):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what is made at the first times may not be captured
        for _ in range(3):
            work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


MODELS = {"resnet": (resnet, 64, 4), "bert": (bert, 8, 1), "decoder": (decoder, 4, 1)}  # how it is made, batch, steps under way

if __name__ == "__main__":
    p = closedloop.parser(__doc__)
    p.add_argument("--model", choices=sorted(MODELS), default="resnet")
    p.add_argument("--batch", type=int)
    p.add_argument("--ahead", type=int)
    p.add_argument("--graph", action="store_true")
    options = p.parse_args()
    make, batch, ahead = MODELS[options.model]
    batch, ahead = options.batch or batch, options.ahead or ahead
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        work = graphed(make(batch)) if options.graph else make(batch)
        for _ in range(20):
            closedloop.step(work).synchronize()
        closedloop.say(ready=True)
        for o in closedloop.orders(p, options):
            closedloop.run(o, work, batch, o.ahead or ahead)
