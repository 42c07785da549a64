// Runs a program and stops it at a call that opens, makes, renames or removes a file below a folder:
//
//   watch_calls kill|hold FOLDER LIST FROM CALL N COMMAND ...
//
// The calls are written to the file LIST, one a line, such as "open a/b", "mkdir a/b" or "rename a b": paths below FOLDER, without
// the random characters after ".tmp-". From the first line that contains FROM on, the N-th line CALL
//
//   kill   is not carried out, SIGKILL ends all processes of the program, and the status is 137;
//   hold   never returns, nor do later lines CALL, as on a file system whose server is gone.
//
// N = 0: no call is stopped. Ends when every process of COMMAND has. The kernel stops the calls (seccomp, user notification): the
// program itself is as it always is. Status 69: that is not allowed here.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

constexpr int not_allowed = 69;
constexpr int killed = 137;

/// Arguments of a call that name files: a folder's descriptor (-1: none) and a path each.
struct Call {
    int number;
    const char* name;
    int folder;
    int path;
    int other_folder = -1;
    int other_path = -1;
    /// Argument with the flags of an open file: without O_CREAT the call is "open". -1: it has none.
    int flags = -1;
};

const std::vector<Call> calls = {
    {SYS_mkdir, "mkdir", -1, 0},
    {SYS_mkdirat, "mkdir", 0, 1},
    {SYS_rename, "rename", -1, 0, -1, 1},
    {SYS_renameat, "rename", 0, 1, 2, 3},
    {SYS_renameat2, "rename", 0, 1, 2, 3},
    {SYS_unlink, "remove", -1, 0},
    {SYS_unlinkat, "remove", 0, 1},
    {SYS_rmdir, "remove", -1, 0},
    {SYS_link, "link", -1, 0, -1, 1},
    {SYS_linkat, "link", 0, 1, 2, 3},
    {SYS_open, "create", -1, 0, -1, -1, 1},
    {SYS_openat, "create", 0, 1, -1, -1, 2},
};

int watch_own_calls() {
    std::vector<sock_filter> code;
    for (const Call& call : calls) {
        code.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
        code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call.number), 0, 1));
        code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
    }
    code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
    return static_cast<int>(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program));
}

/// Sends a descriptor, or receives one where `descriptor` is -1.
int hand_over(int socket, int descriptor) {
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    if (descriptor < 0) {
        if (recvmsg(socket, &message, 0) != 1) return -1;
        const cmsghdr* header = CMSG_FIRSTHDR(&message);
        return header == nullptr ? -1 : *reinterpret_cast<const int*>(CMSG_DATA(header));
    }
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    *reinterpret_cast<int*>(CMSG_DATA(header)) = descriptor;
    return sendmsg(socket, &message, 0) == 1 ? 0 : -1;
}

std::string link_target(const std::string& path) {
    char target[4096];
    const ssize_t length = readlink(path.c_str(), target, sizeof target);
    return length < 0 ? "" : std::string(target, static_cast<std::size_t>(length));
}

/// The absolute path that a stopped thread's argument names.
std::string path_of(const seccomp_notif& stopped, int folder, int path) {
    const std::string process = "/proc/" + std::to_string(stopped.pid);
    char text[4096] = {};
    std::FILE* memory = std::fopen((process + "/mem").c_str(), "rb");
    if (memory == nullptr) return "";
    std::setvbuf(memory, nullptr, _IONBF, 0);
    const auto address = static_cast<long>(stopped.data.args[path]);
    // A path may end just before a page that is not mapped.
    const std::size_t page = 4096 - static_cast<std::size_t>(address) % 4096;
    std::size_t length = 0;
    if (std::fseek(memory, address, SEEK_SET) == 0) {
        length = std::fread(text, 1, page, memory);
        if (length == page && std::string(text, length).find('\0') == std::string::npos)
            length += std::fread(text + length, 1, sizeof text - 1 - length, memory);
    }
    std::fclose(memory);
    const std::string name(text);
    if (!name.empty() && name[0] == '/') return name;
    const int descriptor = folder < 0 ? AT_FDCWD : static_cast<int>(stopped.data.args[folder]);
    return link_target(descriptor == AT_FDCWD ? process + "/cwd" : process + "/fd/" + std::to_string(descriptor)) + "/" + name;
}

std::string without_random_names(std::string path) {
    const std::string mark = ".tmp-";
    for (std::size_t at = path.find(mark); at != std::string::npos; at = path.find(mark, at + mark.size())) {
        std::size_t end = at + mark.size();
        while (end < path.size() && std::isalnum(static_cast<unsigned char>(path[end]))) ++end;
        path.erase(at + mark.size(), end - at - mark.size());
    }
    return path;
}

/// "rename a b" for a call below the folder; "" for another.
std::string line_of(const seccomp_notif& stopped, const std::string& folder) {
    for (const Call& call : calls) {
        if (call.number != stopped.data.nr) continue;
        const bool opens = call.flags >= 0 && (stopped.data.args[call.flags] & O_CREAT) == 0;
        std::string line = opens ? "open" : call.name;
        for (const auto& [at, path] : {std::pair{call.folder, call.path}, std::pair{call.other_folder, call.other_path}}) {
            if (path < 0) continue;
            const std::string named = path_of(stopped, at, path);
            if (named.compare(0, folder.size() + 1, folder + "/") != 0) return "";
            line += " " + without_random_names(named.substr(folder.size() + 1));
        }
        return line;
    }
    return "";
}

}  // namespace

int main(int count, char** words) {
    if (count < 8) return 64;
    const bool holds = std::string(words[1]) == "hold";
    const std::string folder = words[2];
    std::ofstream list(words[3]);
    const std::string from = words[4];
    const std::string stopping = words[5];
    int left = std::atoi(words[6]);
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) return not_allowed;
    const pid_t child = fork();
    if (child == 0) {
        const int listener = watch_own_calls();
        if (listener < 0 || hand_over(sockets[1], listener) != 0) _exit(not_allowed);
        close(listener);
        execvp(words[7], words + 7);
        _exit(127);
    }
    close(sockets[1]);
    const int listener = hand_over(sockets[0], -1);
    if (listener < 0) return not_allowed;
    bool counts = false;
    bool struck = false;
    for (;;) {
        pollfd wait{listener, POLLIN, 0};
        if (poll(&wait, 1, -1) < 0) continue;
        // No process is left that could call.
        if ((wait.revents & POLLIN) == 0) break;
        seccomp_notif stopped{};
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &stopped) != 0) continue;
        const std::string line = line_of(stopped, folder);
        if (!line.empty()) list << line << std::endl;
        counts = counts || (!line.empty() && line.find(from) != std::string::npos);
        if (counts && line == stopping && left > 0 && --left == 0) {
            // Never answered.
            if (holds) {
                left = 1;
                continue;
            }
            struck = true;
            kill(static_cast<pid_t>(stopped.pid), SIGKILL);
            kill(child, SIGKILL);
            continue;
        }
        seccomp_notif_resp answer{};
        answer.id = stopped.id;
        answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
        ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (struck) return killed;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
