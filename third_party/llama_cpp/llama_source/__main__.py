"""python3 -m third_party.llama_cpp.llama_source"""

import sys

from third_party.llama_cpp.llama_source.cli import main

if __name__ == "__main__":
    sys.exit(main())
