"""Episodes of several turns: tools, environments, and the loop that plays them."""

from pl_grouprl.episodes.mcp import MCPTools
from pl_grouprl.episodes.openenv import OpenEnv
