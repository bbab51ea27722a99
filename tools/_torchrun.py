"""torchrun, whose report of a failed process ends in the sentence of that process."""

import sys
from argparse import Namespace

from _command_line import end_in_sentences

end_in_sentences(Namespace())  # torchrun reads the arguments; a missing PyTorch is a sentence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    try:
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        if isinstance(message, dict):  # what vim_mm.mistakes, or torch's own record, left
            sys.exit(message['message'])
        how = f'exit code {failure.exitcode}' if failure.exitcode >= 0 else message
        sys.exit(f'Process {rank} failed ({how}); what it printed stands above.')


if __name__ == '__main__':
    main()
