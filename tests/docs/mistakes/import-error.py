import torch

import elasticstate as elastic
import not_installed
