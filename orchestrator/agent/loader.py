"""The few lines that ``python3 -c`` runs on the far side before the agent itself is there.

The rules are in ``protocol``. The text must run on any Python 3 far enough to say that it is too
old, must never read a byte beyond what it was told of (the rest belongs to the frames), and must
still work with a full disk, because that is a case ``diag`` has to name.
"""

from __future__ import annotations

import os

# umask 077 only while files are made: the agent's children must get the one that pct exec gave.
# Importing inside ``try``: a file that another agent pruned or a crash left short reads as absent.
LOADER = r"""
import os,sys
def g(n):
 b=bytearray()
 while len(b)<n:
  c=os.read(0,min(n-len(b),1<<20))
  if not c:sys.exit()
  b+=c
 return bytes(b)
def no(w):
 os.write(1,os.fsencode("\0DFLASH0 %s %s %s\n"%(w,sys.version.split()[0],sys.executable)))
 sys.exit()
if sys.version_info<(3,10):no("python")
try:import json
except ImportError:no("json")
def e(k,m):
 j=json.dumps({"id":0,"ok":False,"error":{"kind":k,"message":m,"detail":{}}}).encode()
 os.write(1,len(j).to_bytes(4,"big")+bytes(4)+j)
def put(d,h,z):
 p="%s/%s.pyz"%(d,h)
 if not os.path.exists(p):
  t="%s.%d"%(p,os.getpid())
  with open(t,"xb") as f:
   f.write(z);f.flush();os.fsync(f.fileno())
  os.rename(t,p)
 return p
def store(d,h,z):
 u=os.umask(63)
 try:
  os.makedirs(d,exist_ok=True)
  return put(d,h,z)
 except OSError:
  import tempfile
  for s in"/dev/shm","/tmp":
   try:return put(tempfile.mkdtemp("","dflashctl-",s),h,z)
   except OSError as x:r=x
  e("agent.store","no room for the program of the agent: %s"%r);sys.exit()
 finally:os.umask(u)
os.write(1,b"\0DFLASH1\n")
while 1:
 l=b""
 while l[-1:]!=b"\n":l+=g(1)
 h,n,w=os.fsdecode(l[:-1]).split(" ",2)
 p="%s/dflashctl/agent/%s.pyz"%(w,h)
 if int(n):
  z=g(int(n))
  import hashlib
  if hashlib.sha256(z).hexdigest()!=h:
   e("agent.corrupt","these are not the bytes of that hash");sys.exit()
  p=store(os.path.dirname(p),h,z)
 c="%s-%s.pyz"%(p[:-4],sys.implementation.cache_tag)
 sys.path[:0]=[c,p]
 try:
  from orchestrator.agent.__main__ import serve
  k=open(p,"rb")
  break
 except(ImportError,OSError)as x:
  del sys.path[:2]
  sys.path_importer_cache.clear()
  [sys.modules.pop(m)for m in list(sys.modules)if m.startswith("orchestrator")]
  e("agent.absent",str(x))
 while 1:
  x=g(8)
  if x==b"\xff"*8:break
  g(int.from_bytes(x[:4],"big")+int.from_bytes(x[4:],"big"))
serve(h,w,p,k)
"""


def argv(python: str = "python3") -> list[str]:
    """The command that starts the agent.

    ``-I``: nothing of the current folder or of PYTHONPATH is imported. ``-S``: no ``site`` and so
    none of its ``.pth`` files, 1–250 ms.
    """
    return [python, "-I", "-S", "-c", LOADER]


def header(digest: str, length: int, workdir: str) -> bytes:
    """The line that goes first on the agent's standard input.

    ``ValueError`` if ``workdir`` is not absolute or holds a newline or NUL.
    """
    if not workdir.startswith("/") or "\n" in workdir or "\0" in workdir:
        raise ValueError(f"not an absolute folder of one line: {workdir!r}")
    return b"%s %d %s\n" % (digest.encode("ascii"), length, os.fsencode(workdir))
